"""CPU time that the rollout loop takes per turn, with an engine and an environment that take none.

256 trajectories of 8 turns and 64 generated tokens, in both schedulings, metrics and all, without and with every turn
journaled to disk; then trajectories that are ever longer: a turn must not cost more for what was before it, beyond
copying the prompt that must be sent. What is counted is the CPU time of the whole process, environment thread
included; tokenizing is left out, for it depends on the model.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.parts import InstantEnvironment, InstantPolicy, rollout_of, samples
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.output.turn_log import TurnLog
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import Scheduling
from kuberoll_workers.worker.garbage import tune_garbage_collector

TOKENS = 64


async def microseconds_per_turn(scheduling: Scheduling, count: int, turns: int, *, journaled: bool = False) -> float:
    """CPU microseconds of one turn of one trajectory."""
    ended = 0

    async def sink(result: TrajectoryRecord | FailureRecord) -> None:
        nonlocal ended
        ended += 1
        assert result.turn_count == turns, result

    given = samples(count, turns)
    async with (
        turn_log() as log,
        rollout_of(
            InstantPolicy(TOKENS),
            InstantEnvironment(),
            scheduling=scheduling,
            max_turns=turns,
            concurrency=count,
            turn_sink=log.append if journaled else None,
        ) as rollout,
    ):
        began = time.process_time()
        await run_rollout(rollout, given, sink)
        seconds = time.process_time() - began
    assert ended == count
    return seconds / (count * turns) * 1e6


class _Unmeasured:
    def observe(self, amount: float) -> None:
        return None

    def failed(self) -> None:
        return None


@asynccontextmanager
async def turn_log() -> AsyncIterator[TurnLog]:
    with tempfile.TemporaryDirectory() as directory:
        log = TurnLog(Path(directory), 0, seconds=_Unmeasured())
        yield log
        await log.close()


def measured(scheduling: Scheduling, count: int, turns: int, rounds: int, *, journaled: bool = False) -> str:
    times = [asyncio.run(microseconds_per_turn(scheduling, count, turns, journaled=journaled)) for _ in range(rounds)]
    return (
        f"{statistics.median(times):6.1f} µs CPU per turn (median of {rounds} rounds, "
        f"{min(times):.1f} to {max(times):.1f})"
    )


def figures(rounds: int = 7) -> Iterator[Figure]:
    """CPU time of a turn of the loop, and with its turns journaled; garbage is collected as in a worker."""
    tune_garbage_collector()
    for name, journaled, goal in (("loop_cpu_us_per_turn", False, 45.0), ("journaled_turn_cpu_us", True, 60.0)):
        times = [asyncio.run(microseconds_per_turn("Concurrent", 256, 8, journaled=journaled)) for _ in range(rounds)]
        yield Figure(name, statistics.median(times), "µs", goal=goal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    schedulings: tuple[Scheduling, ...] = ("Concurrent", "Lockstep")
    for scheduling in schedulings:
        for journaled in (False, True):
            told = measured(scheduling, arguments.trajectories, arguments.turns, arguments.rounds, journaled=journaled)
            how = ", journaled" if journaled else ""
            print(f"{scheduling}, {arguments.trajectories} × {arguments.turns} turns{how}: {told}")
    for turns in (8, 32, 128, 512):
        print(f"Concurrent, 32 × {turns:3d} turns: {measured('Concurrent', 32, turns, 3)}")


if __name__ == "__main__":
    main()
