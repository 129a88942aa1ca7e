"""CPU time of the metrics, as a part of the rollout loop's own per turn.

The loop of `benchmarks.rollout_loop` is run with its metrics and with ones that do nothing, in turns, so that whatever
else the machine does meets both; and then what one turn tells the metrics is told to them alone, many times over,
which says the same with less noise. The bound is 2 %: an engine and an environment that take no time are the worst
case, and anything real makes it less.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from typing import Any

from benchmarks.parts import TASK, InstantEnvironment, InstantPolicy, rollout_of, samples
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import Scheduling
from kuberoll_workers.telemetry import EnvironmentMetrics, RolloutMetrics

TOKENS = 64
BOUND = 0.02


class SilentEnvironment(EnvironmentMetrics):
    """Is told everything, and counts nothing."""

    def record_response(self, **_: Any) -> None: ...

    def record_turn(self, turn: int, **_: Any) -> None: ...

    def flush(self) -> None: ...

    def flush_if_due(self) -> None: ...

    def record_finish(self, **_: Any) -> None: ...


class SilentMetrics(RolloutMetrics):
    """Metrics that stay as they are."""

    def environment(self, name: str) -> EnvironmentMetrics:
        return self._environments.setdefault(name, SilentEnvironment(self, name))


async def seconds_per_turn(metrics: RolloutMetrics, scheduling: Scheduling, count: int, turns: int) -> float:
    """CPU seconds of one turn of one trajectory."""

    async def sink(result: TrajectoryRecord | FailureRecord) -> None:
        assert result.turn_count == turns, result

    given = samples(count, turns)
    async with rollout_of(
        InstantPolicy(TOKENS),
        InstantEnvironment(),
        scheduling=scheduling,
        max_turns=turns,
        concurrency=count,
        metrics=metrics,
    ) as rollout:
        watching = asyncio.create_task(metrics.watch_event_loop())
        began = time.process_time()
        await run_rollout(rollout, given, sink)
        seconds = time.process_time() - began
        watching.cancel()
    return seconds / (count * turns)


def alone(metrics: RolloutMetrics, count: int, turns: int, rounds: int) -> float:
    """CPU seconds of what one turn of the loop tells the metrics, and its part of what a trajectory tells them."""
    environment = metrics.environment(TASK)
    draw = random.Random(0)
    # No two alike: they are sorted.
    phases = [(draw.random() / 100, draw.lognormvariate(0, 1), draw.random() / 10) for _ in range(count * turns)]
    began = time.process_time()
    for _ in range(rounds):
        told = iter(phases)
        for _ in range(count):
            for turn in range(1, turns + 1):
                environment.generating += 1
                environment.generating -= 1
                environment.record_response(prompt=100, cached=0, generated=TOKENS)
                environment.stepping += 1
                environment.stepping -= 1
                waiting, generation, step = next(told)
                environment.record_turn(
                    turn, waiting_seconds=waiting, generation_seconds=generation, environment_seconds=step, observed=16
                )
            environment.flush_if_due()
            environment.record_finish(stop_reason="terminated", reward=1.0, turns=turns, seconds=2.0)
        # The loop takes a tenth of a second for 256 × 8 turns, which is when it hands them on.
        environment.flush()
    return (time.process_time() - began) / (rounds * count * turns)


def used(kind: type[RolloutMetrics], turns: int) -> RolloutMetrics:
    """Metrics that have been told something: a process makes the library's objects once, in less than a millisecond."""
    metrics = kind("benchmark")
    alone(metrics, 2, turns, 1)
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    count, turns = arguments.trajectories, arguments.turns
    own = min(alone(used(RolloutMetrics, turns), count, turns, 10) for _ in range(arguments.rounds))
    worst = 0.0
    schedulings: tuple[Scheduling, ...] = ("Concurrent", "Lockstep")
    for scheduling in schedulings:
        times: dict[type[RolloutMetrics], list[float]] = {RolloutMetrics: [], SilentMetrics: []}
        for number in range(arguments.rounds):
            # Who comes first is not to be who is measured while the machine is warm.
            for kind in sorted(times, key=lambda kind: kind.__name__, reverse=bool(number % 2)):
                times[kind].append(asyncio.run(seconds_per_turn(used(kind, turns), scheduling, count, turns)))
        told, silent = times[RolloutMetrics], times[SilentMetrics]
        ratio = statistics.median(one / other for one, other in zip(told, silent, strict=True))
        whole = min(told)
        worst = max(worst, own / whole)
        print(
            f"{scheduling}, {count} × {turns} turns: {1e6 * whole:.1f} µs CPU per turn; the metrics "
            f"{1e6 * own:.2f} µs of it: {own / whole:.1%} (with them / without, pair by pair: {ratio:.3f}, median of "
            f"{arguments.rounds})"
        )
    print(f"{worst:.1%} at most; the bound is {BOUND:.0%}")
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
