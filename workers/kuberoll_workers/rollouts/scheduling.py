"""The two schedulings: every trajectory at its own pace, or batches turn by turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from kuberoll_workers.data.prompts import Sample, SampleGroup
from kuberoll_workers.data.record import FailureRecord, Partial, TrajectoryRecord
from kuberoll_workers.rollouts.admission import Drain, SampleAdmission
from kuberoll_workers.rollouts.groups import GroupPolicy, GroupResult, GroupRun, Result
from kuberoll_workers.rollouts.rollout import InFlight, Rollout

_START_BATCH = 64

Sink = Callable[[Result], Awaitable[None]]
"""Takes each trajectory as it ends, finished, given up or dropped; when it returns, the trajectory counts."""
GroupSink = Callable[[GroupResult], Awaitable[None]]
"""Takes each group when nothing of it is left to be run, after its trajectories."""


async def run_rollout(
    rollout: Rollout,
    samples: Iterable[Sample] | AsyncIterable[Sample],
    sink: Callable[[TrajectoryRecord | FailureRecord], Awaitable[None]],
    drain: Drain | None = None,
    *,
    interrupted: Callable[[Partial], None] | None = None,
) -> None:
    """Run all samples, each for itself, at most `concurrency` at once; an endless source is fine.

    Args:
        samples: Taken one by one, when there is room for them.
        sink: Awaited for each result, in the order in which they end. What it raises stops the run.
        interrupted: Told of what is in flight when the run is cancelled: its complete turns.

    Raises:
        Exception: Only what `samples` or `sink` raised: a trajectory's own troubles end in its record.
    """
    single: Any = sink
    await run_groups(rollout, _single_groups(samples), single, drain=drain, interrupted=interrupted)


async def run_groups(
    rollout: Rollout,
    groups: Iterable[SampleGroup] | AsyncIterable[SampleGroup],
    sink: Sink,
    *,
    policy: GroupPolicy | None = None,
    drain: Drain | None = None,
    group_sink: GroupSink | None = None,
    interrupted: Callable[[Partial], None] | None = None,
) -> None:
    """Run prompt groups, at most `concurrency` trajectories at once; an endless source is fine.

    Args:
        groups: Taken one by one, when there is room for a trajectory of the next one.
        sink: Awaited for each result as soon as it is sure: at once, or when its group is complete where the policy
            says that results wait for their group. What it raises stops the run.
        policy: None: groups are only a way to count.
        interrupted: Told of what is in flight, or waits for its group, when the run is cancelled or drained: its
            complete turns.

    Raises:
        TrajectoriesMissing: Something that was begun came to no result; nothing that was stored is harmed by it.
        Exception: What `groups` or a sink raised: a trajectory's own troubles end in its record.
    """
    admission = SampleAdmission(rollout, groups, policy or GroupPolicy(), drain or Drain())
    run = _Run(rollout, admission, sink, group_sink, interrupted)
    try:
        await (run.lockstep() if rollout.settings.scheduling == "Lockstep" else run.concurrent())
    except ExceptionGroup as errors:
        # The first one stopped the run; others came while it was being stopped.
        raise errors.exceptions[0] from (errors if len(errors.exceptions) > 1 else None)
    finally:
        run.report_waiting()
        rollout.flush_metrics()
    run.check_all_ended()


class TrajectoriesMissing(RuntimeError):
    """Trajectories ended without a word. No run is done as long as they are missing; resumed, it plays them again."""


def _single_groups(
    samples: Iterable[Sample] | AsyncIterable[Sample],
) -> Iterable[SampleGroup] | AsyncIterable[SampleGroup]:
    async def asynchronous(source: AsyncIterable[Sample]) -> AsyncIterator[SampleGroup]:
        async for sample in source:
            yield SampleGroup(samples=(sample,), keep=1)

    if isinstance(samples, AsyncIterable):
        return asynchronous(samples)
    return (SampleGroup(samples=(sample,), keep=1) for sample in samples)


class _Run:
    def __init__(
        self,
        rollout: Rollout,
        admission: SampleAdmission,
        sink: Sink,
        group_sink: GroupSink | None,
        interrupted: Callable[[Partial], None] | None,
    ) -> None:
        self._rollout = rollout
        self._admission = admission
        self._sink = sink
        self._group_sink = group_sink
        self._interrupted = interrupted
        self._reported: set[InFlight] = set()
        self._begun = self._ended = 0

    async def concurrent(self) -> None:
        async with asyncio.TaskGroup() as places:
            for number in range(1, self._rollout.settings.concurrency + 1):
                places.create_task(self._slot())
                if number % _START_BATCH == 0:
                    # Thousands at once would hold the event loop up for as long as it takes to begin them all.
                    await asyncio.sleep(0)
                    if self._admission.exhausted:
                        break

    async def _slot(self) -> None:
        # A finished trajectory's place is taken at once by the next sample: there is no batch.
        while (admitted := await self._admission.next()) is not None:
            group, flight = admitted
            self._begun += 1
            try:
                await self._rollout.play(flight)
            except asyncio.CancelledError:
                self._report(flight)
                raise
            await self._end(group, flight)

    async def lockstep(self) -> None:
        while batch := await self._batch():
            phases = _Phases(len(batch))
            async with asyncio.TaskGroup() as trajectories:
                for group, flight in batch:
                    trajectories.create_task(self._play_in_step(group, flight, phases))

    async def _batch(self) -> list[tuple[GroupRun, InFlight]]:
        batch: list[tuple[GroupRun, InFlight]] = []
        while len(batch) < self._rollout.settings.concurrency:
            admitted = await self._admission.next(wait=False)
            if admitted is None:
                break
            self._begun += 1
            batch.append(admitted)
        return batch

    async def _play_in_step(self, group: GroupRun, flight: InFlight, phases: _Phases) -> None:
        try:
            async with flight.guarded():
                while not flight.is_over:
                    await self._rollout.generate(flight)
                    await phases.arrive()
                    await self._rollout.step(flight)
                    await phases.arrive()
        except asyncio.CancelledError:
            self._report(flight)
            raise
        finally:
            phases.leave()
        await self._end(group, flight)

    async def _end(self, group: GroupRun, flight: InFlight) -> None:
        due = group.end(flight)
        self._ended += 1
        self._admission.note_end(group)
        group.pending_results += len(due)
        try:
            if len(due) == 1:
                await self._sink(due[0][1])
            elif due:
                # Together, so that they are stored together.
                await asyncio.gather(*(self._sink(result) for _, result in due))
            group.pending_results -= len(due)
            # The last result to be taken need not be the last that ended.
            if self._group_sink is not None and group.closed and not group.pending_results and not group.reported:
                group.reported = True
                await self._group_sink(group.result)
        except asyncio.CancelledError:
            whole = group.closed and self._group_sink is not None
            for ended in group.finished if whole else [ended for ended, _ in due]:
                self._report(ended)
            raise

    def check_all_ended(self) -> None:
        """Compare what was begun with what came of it.

        Raises:
            TrajectoriesMissing: Names the gap.
        """
        if self._ended != self._begun:
            raise TrajectoriesMissing(
                f"{self._begun - self._ended} of the {self._begun} trajectories that were begun came to no end: "
                "neither stored nor failed"
            )

    def report_waiting(self) -> None:
        """Tell of trajectories that are complete but wait for a group that nobody completes any more."""
        if self._group_sink is not None or self._admission.policy.defers_results:
            for group in self._admission.open_groups:
                for flight in group.finished:
                    self._report(flight)

    def _report(self, flight: InFlight) -> None:
        if self._interrupted is None or flight in self._reported:
            return
        self._reported.add(flight)
        partial = flight.trajectory.partial()
        if partial is not None:
            self._interrupted(partial)


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
