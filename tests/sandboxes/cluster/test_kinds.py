"""Tasks of many kinds as pods of a real cluster: the solution is worth 1, and doing nothing 0."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import pytest

from kuberoll_api.model.sandboxes import Sandbox as SandboxOptions
from kuberoll_workers.harbor.checking import Checked, check_tasks
from kuberoll_workers.harbor.task import read_tasks
from kuberoll_workers.sandboxes.connection import Ticket
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.leases import Sandboxes
from kuberoll_workers.sandboxes.pods.driver import PodDriver
from tests.harbor.kinds import KINDS, write_tasks
from tests.sandboxes.cluster.real import RealCluster
from tests.sandboxes.waiting import until

pytestmark = [pytest.mark.timeout(1800)]


class TimedDriver(PodDriver):
    """Notes how long starts take.

    Attributes:
        seconds: Of each that came to something.
    """

    def __init__(self, *, environment: str, variables: dict[str, str]) -> None:
        super().__init__(environment=environment, variables=variables)
        self.seconds: list[float] = []

    async def create(self, name: str, spec: SandboxSpec) -> Ticket:
        began = time.monotonic()
        ticket = await super().create(name, spec)
        self.seconds.append(time.monotonic() - began)
        return ticket


@pytest.fixture(scope="module")
def folder(
    cluster: RealCluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """The tasks, and why some are left out."""
    directory = tmp_path_factory.mktemp("kinds")
    try:
        images = {"python": request.getfixturevalue("debian")}
    except pytest.skip.Exception:
        images = {}
    left = write_tasks(
        directory,
        images=images,
        publish=lambda name, reference: cluster.images.push(f"kind-{name}", reference, directory),
    )
    assert len(KINDS) - len(left) >= 20, left
    return directory / "tasks", left


async def test_the_solution_of_each_is_worth_1_and_doing_nothing_0(
    cluster: RealCluster, folder: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = read_tasks(folder[0])
    found: list[Checked] = []
    async with cluster.serving() as making:
        driver = TimedDriver(**making.arguments)
        sandboxes = Sandboxes(driver)
        try:
            await check_tasks(tasks, SandboxOptions(), sandboxes, parallel=2, done=found.append)
        finally:
            await sandboxes.close()
        await until(lambda: not cluster.traces(), "nothing is left")
    with capsys.disabled():
        sys.stdout.write(report(found, driver.seconds, folder[1]))
    assert {one.task: (one.problem, one.solution.reward, one.nothing.reward) for one in found} == {
        task.name: (None, 1.0, 0.0) for task in tasks
    }


def report(found: list[Checked], starts: list[float], left: dict[str, str]) -> str:
    """How long each has taken."""
    lines = [
        f"{one.task:<30} {one.solution.seconds:6.1f} s {one.nothing.seconds:6.1f} s  {one.problem or ''}"
        for one in sorted(found, key=lambda one: one.task)
    ]
    cuts = statistics.quantiles(starts, n=20)
    lines.append(f"{len(starts)} starts: p50 {cuts[9]:.2f} s, p95 {cuts[18]:.2f} s; left out: {left or 'none'}")
    return "\n".join(["", *lines, ""])
