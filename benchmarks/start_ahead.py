"""What starting sandboxes ahead of their trajectories gains: the time for which places wait for a machine.

    .venv/bin/python -m benchmarks.start_ahead

One job with real sandboxes in namespaces and agents that wait, of lognormal times, is played with no machine started
ahead, with several numbers of them, and with all machines ready before it begins, which no program could better. A
machine's set-up sleeps, as a pod's start would. All runs are of one process, one after the other, twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from kuberoll_api.ahead import usual_ahead
from kuberoll_api.model.environments import Environment
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.registry import create
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.harbor.environment import SandboxAgents
from kuberoll_workers.harbor.rows import row_of
from kuberoll_workers.harbor.task import read_task
from kuberoll_workers.players.sessions import player_of
from kuberoll_workers.rollouts.episodes import Episodes
from kuberoll_workers.rollouts.scheduling import run_groups
from kuberoll_workers.sandboxes.drivers import VARIABLE
from kuberoll_workers.sandboxes.meters import UNUSED, USED
from kuberoll_workers.telemetry import definitions as metrics
from tests.harbor.artificial import ENTRYPOINT, TOML, ArtificialPolicy, groups_of
from tests.harbor.writing import write_task
from tests.rollouts.fakes import rollout_of
from tests.sandboxes.layouts import busybox_layout

CONCURRENCY = 8
GROUPS, SIZE = 4, 8
SETUP_SECONDS = 0.5
MEDIAN_SECONDS, SIGMA = 1.5, 0.7
HEALTHCHECK = """
[environment.healthcheck]
command = "sleep {seconds}"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A run of the job.

    Attributes:
        seconds: Its duration.
        idle: The part of its places' time for which they waited for a machine.
        wait: Mean seconds for which a trajectory waited, without those that had a place at once, whose starts nothing
            hides.
        used, unused: Machines that were started ahead.
    """

    seconds: float
    idle: float
    wait: float
    used: float
    unused: float


async def played(row: dict[str, Any], seconds: list[list[float]], ahead: int, *, ready: bool = False) -> Played:
    """Play the job.

    Args:
        ahead: Number of machines that are started ahead.
        ready: All are, before it begins.
    """
    spec = Environment.model_validate(
        {"name": "env", "agent": {"entrypoint": ENTRYPOINT}, "sandbox": {"startAhead": ahead}}
    )
    made: list[SandboxAgents] = []

    def factory() -> Any:
        environment = create(spec)
        assert isinstance(environment, SandboxAgents)
        made.append(environment)
        return environment

    runner = EnvironmentRunner(
        make_executor(factory, isolation="Inline", processes=1, timeout=spec.call_seconds), max_batch=1
    )
    count = 0

    async def sink(_: object) -> None:
        nonlocal count
        count += 1

    try:
        rollout = rollout_of(
            {"env": runner}, policy=ArtificialPolicy(), concurrency=CONCURRENCY, players={"env": player_of(spec)}
        )
        groups = groups_of(row, seconds)
        [environment] = made
        if ready:
            await runner.find_hooks()
            episodes: Episodes = rollout.episodes
            for sample in itertools.chain.from_iterable(group.samples for group in groups):
                runner.prepare(episodes.episode(sample))
            while environment.ahead.ready < sum(map(len, seconds)):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.05)
        began = time.perf_counter()
        await run_groups(rollout, groups, sink)
        took = time.perf_counter() - began
        waited = environment.meters.take()[metrics.SANDBOX_WAIT_SECONDS.name, ()]
    finally:
        await runner.close()
    assert count == len(waited) == sum(map(len, seconds))
    used, unused = (environment.meters.value(metrics.SANDBOXES_PREPARED, result) for result in (USED, UNUSED))
    return Played(
        seconds=took,
        idle=sum(waited) / (took * CONCURRENCY),
        wait=statistics.mean(waited[CONCURRENCY:] or [0.0]),
        used=used,
        unused=unused,
    )


async def measured(directory: Path, numbers: list[int], rounds: int) -> dict[str, list[Played]]:
    """Runs by what they are called."""
    write_task(
        directory / "task",
        changed={
            "task.toml": (TOML + HEALTHCHECK).format(image=busybox_layout(directory / "image"), seconds=SETUP_SECONDS)
        },
    )
    row = row_of(read_task(directory / "task"), str(directory / "task"))
    chance = random.Random(7)
    seconds = [[min(5.0, chance.lognormvariate(0, SIGMA) * MEDIAN_SECONDS) for _ in range(SIZE)] for _ in range(GROUPS)]
    # The image is unpacked, and the runtime is made.
    await played(row, [[0.0] * SIZE], 0)
    found: dict[str, list[Played]] = {}
    for _ in range(rounds):
        for number in numbers:
            found.setdefault(f"{number} ahead", []).append(await played(row, seconds, number))
        found.setdefault("all ready", []).append(await played(row, seconds, 0, ready=True))
    return found


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A directory for everything, and the driver of namespaces."""
    with tempfile.TemporaryDirectory(prefix="kr-") as directory:
        os.environ[VARIABLE] = "namespaces"
        os.environ["XDG_STATE_HOME"] = str(Path(directory) / "state")
        yield Path(directory)


def figures() -> Iterator[Figure]:
    """See `benchmarks.run`."""
    usual = usual_ahead(CONCURRENCY)
    with place() as directory:
        found = asyncio.run(measured(directory, [0, usual], 1))
    off, on, bound = (found[name][0].seconds for name in ("0 ahead", f"{usual} ahead", "all ready"))
    yield Figure("a job with sandboxes that start ahead", on / bound, "x", baseline=off / bound, bound=1.0)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=2)
    rounds = arguments.parse_args().rounds
    with place() as directory:
        found = asyncio.run(measured(directory, [0, 1, 2, 4], rounds))
    bound = statistics.mean(one.seconds for one in found["all ready"])
    for name, runs in found.items():
        seconds = statistics.mean(one.seconds for one in runs)
        idle = statistics.mean(one.idle for one in runs)
        wait = statistics.mean(one.wait for one in runs)
        print(
            f"{name:<10} {seconds:6.1f} s  {seconds / bound:5.3f} x  places waited {idle:6.1%}, "
            f"later trajectories {wait:6.3f} s  "
            f"used {sum(one.used for one in runs):g}, unused {sum(one.unused for one in runs):g}"
        )


if __name__ == "__main__":
    main()
