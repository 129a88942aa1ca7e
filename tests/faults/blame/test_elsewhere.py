"""Whose doing it is where more than one trajectory is hit: servers of environments, replicas, disks, clocks, drains."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.environments.remote.addresses import UrlAddresses
from kuberoll_workers.environments.remote.executor import RemoteExecutor
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.output import records
from kuberoll_workers.output.journal import JournalBroken
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.routing.discovery import StaticDiscovery
from kuberoll_workers.policy.routing.router import RoutedPolicy
from kuberoll_workers.rollouts.scheduling import run_rollout
from tests.environments.remote.servers import ServerProcess
from tests.faults.blame.engines import Engines
from tests.faults.blame.playing import RETRIES
from tests.output.support import store_at
from tests.rollouts.fakes import CountingEnvironment, rollout_of, runners, sample

pytestmark = pytest.mark.slow

COUNT = 10


async def ends(made: Any, *, count: int = COUNT, metadata: Any = None, **changes: Any) -> list[Any]:
    """Records of trajectories of two turns."""
    found: list[Any] = []

    async def sink(result: Any) -> None:
        found.append(result)

    rollout = rollout_of(made, retries=RETRIES, **changes)
    async with asyncio.timeout(240):
        await run_rollout(rollout, [sample(number, metadata=metadata) for number in range(count)], sink)
    assert len(found) == count
    return found


def causes(found: list[Any]) -> set[tuple[str, str | None]]:
    """Kinds and reasons of failures; all of them are some."""
    assert all(isinstance(record, FailureRecord) for record in found)
    return {(record.kind, record.reason) for record in found}


@asynccontextmanager
async def served(url: str, *, seconds: float = 1.0) -> AsyncIterator[dict[str, EnvironmentRunner]]:
    executor = RemoteExecutor(UrlAddresses([url]), name="env", timeout=seconds, check_seconds=0.3, patience=1.5)
    runner = EnvironmentRunner(executor, max_batch=1)
    try:
        yield {"env": runner}
    finally:
        await runner.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    made = ServerProcess("tests.faults.blame.acting:Acting", "--config", "{}")
    try:
        made.ready()
        yield made
    finally:
        made.close()


WORTH = {"do": ["nothing", ""], "worth": 0.5}


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_server_of_an_environment_that_is_silent_or_gone(server: ServerProcess, how: str) -> None:
    async with served(server.url) as made:
        good = await ends(made, metadata=WORTH)
        assert {(type(one), one.total_reward, one.incidents) for one in good} == {(TrajectoryRecord, 0.5, None)}
        server.kill(signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        found = await ends(made, count=2, metadata=WORTH)
        server.kill(signal.SIGCONT)
    assert causes(found) == {("infrastructure", "EnvironmentUnreachable")}


@pytest.mark.parametrize("what", ["500", "429", "cut", "silent"])
async def test_a_replica_behind_the_router(what: str) -> None:
    async with Engines(lambda _: "", "").serving() as engines, runners({"env": CountingEnvironment()}) as made:
        # It has no route for health, so that it is found ill at once, as a replica of an old version is.
        discovery = StaticDiscovery([f"{engines.url}/{what}"])
        async with RoutedPolicy(discovery, lambda url: ServeClient(url, limit=64)) as policy:
            found = await ends(made, policy=policy, generation_seconds=0.5)
    assert {kind for kind, _ in causes(found)} == {"infrastructure"}, causes(found)


async def test_nobody_has_replicas() -> None:
    nowhere = RoutedPolicy(StaticDiscovery([]), lambda url: ServeClient(url, limit=64))
    async with runners({"env": CountingEnvironment()}) as made, nowhere as policy:
        found = await ends(made, policy=policy, generation_seconds=0.2)
    assert {kind for kind, _ in causes(found)} == {"infrastructure"}


async def test_a_clock_that_jumps_misjudges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = itertools.cycle([0.0, 1e7, -1e7, -3600.0, 86400.0])
    monkeypatch.setattr(time, "time", lambda real=time.time: real() + next(jumps))
    async with runners({"env": CountingEnvironment()}) as made:
        found = await ends(made, turn_seconds=60.0, trajectory_seconds=120.0)
    assert {(type(one), one.total_reward, one.incidents) for one in found} == {(TrajectoryRecord, 2.0, None)}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)], check=False)
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


async def test_a_run_s_disk_that_is_full_fails_as_infrastructure_or_ends_the_run(small_disk: Path) -> None:
    store = store_at(small_disk)
    (small_disk / "ballast").write_bytes(b"x" * (44 << 10))
    failed: list[Any] = []

    async def sink(result: Any) -> None:
        if isinstance(result, FailureRecord):
            failed.append(result)
            return
        await store.result(result)

    ended: Exception | None = None
    try:
        async with runners({"env": CountingEnvironment()}) as made:
            rollout = rollout_of(made, retries=RETRIES, turn_sink=store.turn)
            await run_rollout(rollout, [sample(number) for number in range(200)], sink)
    except (JournalBroken, OSError, ExceptionGroup) as error:
        ended = error
    finally:
        with contextlib.suppress(JournalBroken):
            await store.close()
    assert failed or ended is not None
    assert {(one.kind, one.reason) for one in failed} <= {("infrastructure", "StorageFailed")}
    # What is stored is whole, and right.
    stored = list(records.trajectories(DirectoryStorage(small_disk), "shard-00000"))
    assert {one.total_reward for one in stored} <= {2.0}
