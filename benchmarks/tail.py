"""Heavy tails: how much longer a batch takes than its longest trajectory would take alone.

128 trajectories of 8 turns; every generation and every environment step is lognormal, median 100 ms, sigma 1. No
scheduling can be faster than the longest trajectory's own time, which is the bound; Lockstep waits for the slowest of
the batch twice in every turn and is the baseline. Then an endless source: 64 prompt groups of 8 with 64 places, each
group kept with its first 8 finishers, with and without two samples to spare.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.figures import Figure
from benchmarks.parts import InstantEnvironment, SlowEnvironment, SlowPolicy, lognormal, rollout_of, samples
from kuberoll_workers.data.prompts import SampleGroup
from kuberoll_workers.rollouts.drop_report import DropReport
from kuberoll_workers.rollouts.groups import Result
from kuberoll_workers.rollouts.scheduling import run_groups, run_rollout
from kuberoll_workers.rollouts.settings import Scheduling

COUNT, TURNS, TOKENS = 128, 8, 64


async def batch(scheduling: Scheduling, generation: Any, environment: Any) -> float:
    """Wall seconds of a batch."""

    async def sink(result: Any) -> None:
        assert result.turn_count == TURNS

    given = samples(COUNT, TURNS)
    async with rollout_of(
        SlowPolicy(TOKENS, generation),
        SlowEnvironment(environment),
        scheduling=scheduling,
        max_turns=TURNS,
        concurrency=COUNT,
    ) as rollout:
        began = time.perf_counter()
        await run_rollout(rollout, given, sink)
        return time.perf_counter() - began


async def grouped(spare: int) -> tuple[float, DropReport]:
    """Wall seconds of 64 groups of 8, and what keeping the first finishers did."""
    report = DropReport()

    async def sink(result: Result) -> None:
        report.add(result)

    turns = lognormal("turns", median=4.0, sigma=1.0)

    def generation(trajectory: int, turn: int) -> float:
        return lognormal("groups", median=0.02, sigma=1.0)(trajectory, turn)

    def groups() -> Any:
        plain = samples(64 * 16, 1)
        for index in range(64):
            members = [
                dataclasses.replace(
                    sample,
                    prompt=dataclasses.replace(
                        sample.prompt,
                        metadata={"left": min(64, 1 + int(turns(sample.prompt.task_index, 0))), "number": 0},
                    ),
                )
                for sample in plain[16 * index : 16 * index + 8 + spare]
            ]
            yield SampleGroup(samples=tuple(members), keep=8)

    async with rollout_of(
        SlowPolicy(TOKENS, generation), InstantEnvironment(), max_turns=64, concurrency=64
    ) as rollout:
        began = time.perf_counter()
        await run_groups(rollout, groups(), sink)
        return time.perf_counter() - began, report


def round_of(number: int) -> tuple[float, float, float]:
    """Seconds of the longest trajectory alone, and by how much each scheduling takes longer: Concurrent, Lockstep."""
    generation = lognormal(f"generation {number}", median=0.1, sigma=1.0)
    environment = lognormal(f"environment {number}", median=0.1, sigma=1.0)
    alone = max(
        sum(generation(index, turn) + environment(index, turn) for turn in range(1, TURNS + 1))
        for index in range(COUNT)
    )
    concurrent = asyncio.run(batch("Concurrent", generation, environment)) / alone
    return alone, concurrent, asyncio.run(batch("Lockstep", generation, environment)) / alone


def figures(rounds: int = 2) -> Iterator[Figure]:
    """The makespan of a batch with heavy tails over its bound."""
    found = [round_of(number) for number in range(rounds)]
    yield Figure(
        "makespan_over_bound_tail",
        statistics.median(concurrent for _, concurrent, _ in found),
        "ratio",
        baseline=statistics.median(lockstep for _, _, lockstep in found),
        bound=1.0,
        goal=1.01,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for number in range(arguments.rounds):
        alone, concurrent, lockstep = round_of(number)
        print(f"longest trajectory alone {alone:.2f} s: Concurrent {concurrent:.3f} ×, Lockstep {lockstep:.3f} ×")
    for spare in (0, 2):
        seconds, report = asyncio.run(grouped(spare))
        kept = report.kept
        dropped = report.dropped.get("oversampled")
        print(
            f"64 groups of 8, {spare} to spare: {seconds:.2f} s; kept {kept.trajectories}, mean "
            f"{kept.turns / kept.trajectories:.2f} turns"
            + (
                f"; dropped {dropped.trajectories}, {dropped.turns / dropped.trajectories:.2f} turns so far"
                if dropped
                else ""
            )
        )


if __name__ == "__main__":
    main()
