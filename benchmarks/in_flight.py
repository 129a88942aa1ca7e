"""Ten thousand trajectories in flight in one process: its memory, and how late its event loop is.

Every generation takes about as long as it does on a busy cluster (lognormal, median 4 s), the environment none. What is
reported: resident memory at most, and above that of the process before the run; how late a timer was that should have
run every 10 ms, while all trajectories were in flight, their start and the end left out and separately.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator

import psutil

from benchmarks.figures import Figure
from benchmarks.parts import InstantEnvironment, SlowPolicy, lognormal, rollout_of, samples
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.worker.garbage import tune_garbage_collector

INTERVAL_SECONDS = 0.01


async def run(count: int, turns: int, tokens: int, median: float) -> tuple[float, float]:
    """Print what was found; return MiB resident at most, and the 99th percentile of the lag in milliseconds."""
    process = psutil.Process()
    ended: list[float] = []
    lags: list[tuple[float, float]] = []
    memory: list[int] = []
    in_flight = 0
    full = 0.0

    async def sink(result: TrajectoryRecord | FailureRecord) -> None:
        assert result.turn_count == turns, result
        ended.append(time.perf_counter())

    async def watch() -> None:
        due = time.perf_counter()
        while True:
            due += INTERVAL_SECONDS
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            now = time.perf_counter()
            lags.append((now, now - due))
            due = max(due, now)
            if len(lags) % 25 == 0:
                memory.append(process.memory_info().rss)

    seconds = lognormal("generation", median=median, sigma=0.5)

    class Counting(SlowPolicy):
        async def generate(self, request):  # type: ignore[no-untyped-def]
            nonlocal in_flight, full
            in_flight += 1
            if in_flight == count and not full:
                full = time.perf_counter()
            try:
                return await super().generate(request)
            finally:
                in_flight -= 1

    given = samples(count, turns)
    before = process.memory_info().rss
    watching = asyncio.create_task(watch())
    began, cpu = time.perf_counter(), time.process_time()
    async with rollout_of(
        Counting(tokens, seconds), InstantEnvironment(), max_turns=turns, concurrency=count, generation_seconds=6000.0
    ) as rollout:
        await run_rollout(rollout, given, sink)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    watching.cancel()

    steady = sorted(lag for at, lag in lags if full <= at <= ended[0])
    start = [lag for at, lag in lags if at < full]
    print(f"{count} trajectories × {turns} turns × {tokens} tokens: {wall:.1f} s, {cpu:.1f} s of CPU")
    print(f"memory: {max(memory) / 2**20:.0f} MiB at most, {(max(memory) - before) / 2**20:.0f} MiB above the start")
    print(f"all in flight after {full - began:.2f} s; event loop lag until then: max {max(start) * 1e3:.0f} ms")
    print(
        f"event loop lag with all in flight: median {statistics.median(steady) * 1e3:.1f} ms, "
        f"p99 {steady[int(len(steady) * 0.99)] * 1e3:.1f} ms, max {steady[-1] * 1e3:.1f} ms ({len(steady)} timers)"
    )
    return max(memory) / 2**20, steady[int(len(steady) * 0.99)] * 1e3


def figures() -> Iterator[Figure]:
    """Memory, and the event loop's lag, of 10,000 trajectories in flight; in a process that has done nothing else."""
    tune_garbage_collector()
    memory, lag = asyncio.run(run(10_000, 8, 64, 4.0))
    yield Figure("in_flight_10000_rss_mb", memory, "MiB", goal=255.0)
    yield Figure("event_loop_lag_p99_ms", lag, "ms", goal=50.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--median-seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    tune_garbage_collector()
    asyncio.run(run(arguments.trajectories, arguments.turns, arguments.tokens, arguments.median_seconds))


if __name__ == "__main__":
    main()
