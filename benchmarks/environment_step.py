"""What a step costs between the loop and the environment, by isolation: seconds that pass, and CPU of the worker.

An environment that does next to nothing, stepped over and over by one caller: once for one trajectory, once for a
batch of 64, with chats of 1,000 characters and small metadata. The CPU time is that of the worker's process, and beside
it that of the processes that the worker starts: the environment's own, and with Remote its server's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from typing import Any

import psutil

from kuberoll_workers.environments.batches import StepBatch
from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.registry import PlainSpec

SPEC = PlainSpec(name="env", type=None, entrypoint=f"{__spec__.name if __spec__ else __name__}:Echo", config={})


class Echo:
    """Hands the metadata back."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        size = len(logs)
        return EnvironmentReturn(
            [{"role": "environment", "content": "observed"}] * size,
            [{**state, "moves": state["moves"] + 1} for state in metadata],
            None,
            [1.0] * size,
            [False] * size,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


async def measured(isolation: str, size: int, steps: int, rounds: int) -> str:
    executor = make_executor(SPEC, isolation=isolation, processes=1, timeout=600)
    logs = [[{"role": "user", "content": "x" * 900}, {"role": "assistant", "content": "y" * 100}] for _ in range(size)]
    metadata: list[Any] = [{"board": [[1, 2, 3], [4, 5, 6], [7, 8, 0]], "moves": 3, "goal": "solved"}] * size
    wall, cpu, other = [], [], []
    try:
        await executor.run(StepBatch.of_columns(logs, metadata))
        for _ in range(rounds):
            began, used, theirs = time.perf_counter(), time.process_time(), children_seconds()
            for _ in range(steps):
                await executor.run(StepBatch.of_columns(logs, metadata))
            wall.append((time.perf_counter() - began) / steps * 1e6)
            cpu.append((time.process_time() - used) / steps * 1e6)
            other.append((children_seconds() - theirs) / steps * 1e6)
    finally:
        await executor.close()
    return (
        f"{isolation:8} {size:3} trajectories: {statistics.median(wall):8.0f} µs, worker's CPU "
        f"{statistics.median(cpu):7.0f} µs ({statistics.median(cpu) / size:6.1f} each), others' "
        f"{statistics.median(other):7.0f} µs ({statistics.median(other) / size:6.1f} each)"
    )


def children_seconds() -> float:
    """CPU time of the processes that run below this one."""
    times = [one.cpu_times() for one in psutil.Process().children(recursive=True)]
    return sum(one.user + one.system for one in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for isolation in ("Inline", "Process", "Remote"):
        for size in (1, 64):
            steps = max(1, arguments.steps // (1 if size == 1 else 10))
            print(asyncio.run(measured(isolation, size, steps, arguments.rounds)))


if __name__ == "__main__":
    main()
