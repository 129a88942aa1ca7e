"""The two schedulings: every trajectory at its own pace, or batches turn by turn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator

from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.rollouts.turns import Flight, Rollout

Sink = Callable[[TrajectoryRecord | FailureRecord], Awaitable[None]]
"""Takes each trajectory as it ends, finished or given up; when it returns, the trajectory counts."""


class Drain(asyncio.Event):
    """Set it to stop admitting: what is in flight is finished, what is not begun stays undone."""


async def run_rollout(rollout: Rollout, samples: Iterable[Sample], sink: Sink, drain: Drain | None = None) -> None:
    """Run all samples, at most `concurrency` at once; an endless source is fine.

    Args:
        samples: Taken one by one, when there is room for them.
        sink: Awaited for each result, in the order in which they end. What it raises stops the run.

    Raises:
        Exception: Only what `samples` or `sink` raised: a trajectory's own troubles end in its record.
    """
    source = _admitted(samples, drain if drain is not None else Drain())
    schedule = _lockstep if rollout.settings.scheduling == "Lockstep" else _concurrent
    await schedule(rollout, source, sink)


def _admitted(samples: Iterable[Sample], drain: Drain) -> Iterator[Sample]:
    for sample in samples:
        if drain.is_set():
            return
        yield sample


async def _concurrent(rollout: Rollout, source: Iterator[Sample], sink: Sink) -> None:
    async def place() -> None:
        # A finished trajectory's place is taken at once by the next sample: there is no batch.
        for sample in source:
            flight = rollout.admit(sample)
            async with flight.guarded():
                while not flight.over:
                    await rollout.generate(flight)
                    await rollout.step(flight)
            await sink(flight.result())

    async with asyncio.TaskGroup() as group:
        for _ in range(rollout.settings.concurrency):
            group.create_task(place())


async def _lockstep(rollout: Rollout, source: Iterator[Sample], sink: Sink) -> None:
    async def play(flight: Flight, phases: _Phases) -> None:
        try:
            async with flight.guarded():
                while not flight.over:
                    await rollout.generate(flight)
                    await phases.arrive()
                    await rollout.step(flight)
                    await phases.arrive()
        finally:
            phases.leave()

    while batch := [rollout.admit(sample) for sample in itertools.islice(source, rollout.settings.concurrency)]:
        phases = _Phases(len(batch))
        async with asyncio.TaskGroup() as group:
            for flight in batch:
                group.create_task(play(flight, phases))
        for flight in batch:
            await sink(flight.result())


class _Phases:
    """Makes trajectories wait for one another at the end of each phase of a turn; who has ended is waited for no more.

    One task per trajectory and a barrier cost half of a new task per trajectory and phase.
    """

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._arrived = 0
        self._gate = asyncio.Event()

    async def arrive(self) -> None:
        self._arrived += 1
        gate = self._gate
        self._open_if_all()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            # A deadline passed while waiting: who leaves is not to be counted as one who came.
            if not gate.is_set():
                self._arrived -= 1
            raise

    def leave(self) -> None:
        self._parties -= 1
        self._open_if_all()

    def _open_if_all(self) -> None:
        if self._arrived >= self._parties:
            self._arrived = 0
            self._gate.set()
            self._gate = asyncio.Event()
