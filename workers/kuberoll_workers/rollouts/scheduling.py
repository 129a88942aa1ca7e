"""The two schedulings: Concurrent, each trajectory at its own pace, and Lockstep, batches turn by turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from kuberoll_workers.data.prompts import Sample, SampleGroup
from kuberoll_workers.data.record import FailureRecord, Partial, TrajectoryRecord
from kuberoll_workers.rollouts.admission import Drain, SampleAdmission
from kuberoll_workers.rollouts.groups import GroupPolicy, GroupResult, GroupRun, Result
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.pace import Pace
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.run_ahead import RunAhead

_START_BATCH = 64

_log = logging.getLogger(__name__)

Sink = Callable[[Result], Awaitable[None]]
"""Called with each trajectory that finished, failed permanently or was dropped; it counts once the call returns."""
GroupSink = Callable[[GroupResult], Awaitable[None]]
"""Called with each group when all its trajectories have ended, after the sink has taken them."""


async def run_rollout(
    rollout: Rollout,
    samples: Iterable[Sample] | AsyncIterable[Sample],
    sink: Callable[[TrajectoryRecord | FailureRecord], Awaitable[None]],
    drain: Drain | None = None,
    *,
    interrupted: Callable[[Partial], None] | None = None,
    run_ahead: RunAhead | None = None,
) -> None:
    """Run all samples independently, at most `concurrency` at once; the source may be endless.

    Args:
        samples: Taken one by one, as slots become free.
        sink: Awaited for each result, in the order in which they end. An exception from it stops the run.
        interrupted: Called with the complete turns of each trajectory in flight when the run is cancelled.
        run_ahead: Bounds the trajectories that have been started and whose results have not been read; None: no bound.

    Raises:
        Exception: Only from `samples` or `sink`: errors of a trajectory are stored in its record.
    """
    single: Any = sink
    groups = _single_groups(samples)
    await run_groups(rollout, groups, single, drain=drain, interrupted=interrupted, run_ahead=run_ahead)


async def run_groups(
    rollout: Rollout,
    groups: Iterable[SampleGroup] | AsyncIterable[SampleGroup],
    sink: Sink,
    *,
    policy: GroupPolicy | None = None,
    drain: Drain | None = None,
    group_sink: GroupSink | None = None,
    interrupted: Callable[[Partial], None] | None = None,
    run_ahead: RunAhead | None = None,
    pace: Pace | None = None,
    admitted: Callable[[SampleAdmission], None] | None = None,
) -> None:
    """Run prompt groups, at most `concurrency` trajectories at once; the source may be endless.

    Args:
        groups: Taken one by one, when a slot is free for a trajectory of the next one.
        sink: Awaited for each result as soon as it is final: at once, or, if the policy defers results, when its group
            is complete. An exception from it stops the run.
        policy: None: groups are only counted.
        interrupted: Called with the complete turns of each trajectory that is in flight, or waits for its group, when
            the run is cancelled or drained.
        run_ahead: Bounds the trajectories that have been started and whose results have not been read; None: no bound.
        pace: What the run's consumer allows; None: everything.
        admitted: Called once with the admission of the run's groups.

    Raises:
        TrajectoriesMissing: A trajectory was started and has no result; what is stored is not affected.
        Exception: From `groups` or a sink: errors of a trajectory are stored in its record.
    """
    admission = SampleAdmission(rollout, groups, policy or GroupPolicy(), drain or Drain(), run_ahead, pace)
    if admitted is not None:
        admitted(admission)
    run = _Run(rollout, admission, sink, group_sink, interrupted)
    try:
        async with run.preparing():
            await (run.lockstep() if rollout.settings.scheduling == "Lockstep" else run.concurrent())
    except ExceptionGroup as errors:
        # The first one stopped the run; the others were raised while it was being stopped.
        raise errors.exceptions[0] from (errors if len(errors.exceptions) > 1 else None)
    finally:
        run.report_waiting()
        rollout.flush_metrics()
    run.check_all_ended()


class TrajectoriesMissing(RuntimeError):
    """Trajectories are neither stored nor failed. The run is not complete without them; resuming it runs them again."""


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
        self._preparations = rollout.preparations()
        self._reported: set[InFlight] = set()
        self._begun = self._ended = 0

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """Prepare episodes ahead of their trajectories during the block."""
        preparing = asyncio.create_task(self._prepare())
        try:
            yield
        finally:
            preparing.cancel()
            await asyncio.wait((preparing,))
            self._preparations.update(())

    async def _prepare(self) -> None:
        try:
            if not (reach := await self._preparations.find()):
                return
            while True:
                await self._admission.change()
                self._preparations.update(self._admission.upcoming(reach))
        except Exception:
            # Trajectories begin without it; what they need, and cannot have, is reported then.
            _log.exception("no episodes are prepared ahead of their trajectories any more")

    async def concurrent(self) -> None:
        async with asyncio.TaskGroup() as places:
            for number in range(1, self._rollout.settings.concurrency + 1):
                places.create_task(self._slot())
                if number % _START_BATCH == 0:
                    # Starting thousands at once would block the event loop.
                    await asyncio.sleep(0)
                    if self._admission.exhausted:
                        break

    async def _slot(self) -> None:
        # The next sample takes the slot of a finished trajectory at once: there is no batch.
        while (admitted := await self._admission.next()) is not None:
            group, flight = admitted
            self._begun += 1
            if self._preparations.active:
                self._preparations.begin(flight.sample)
            try:
                await self._rollout.play(flight)
            except asyncio.CancelledError:
                self._report(flight)
                raise
            finally:
                if self._preparations.active:
                    self._preparations.end(flight.sample)
            await self._end(group, flight)

    async def lockstep(self) -> None:
        while batch := await self._batch():
            phases = _Phases(len(batch))
            async with asyncio.TaskGroup() as trajectories:
                for group, flight in batch:
                    trajectories.create_task(self._play_in_step(group, flight, phases))

    async def _batch(self) -> list[tuple[GroupRun, InFlight]]:
        batch: list[tuple[GroupRun, InFlight]] = []
        size = self._rollout.settings.concurrency
        while len(batch) < size:
            # A reader must leave room for a whole batch: its turns take as long as those of a small one.
            admitted = await (self._admission.next(wait=False) if batch else self._admission.next(room=size))
            if admitted is None:
                break
            self._begun += 1
            self._preparations.begin(admitted[1].sample)
            batch.append(admitted)
        return batch

    async def _play_in_step(self, group: GroupRun, flight: InFlight, phases: _Phases) -> None:
        try:
            await self._rollout.play(flight, phases.arrive)
        except asyncio.CancelledError:
            self._report(flight)
            raise
        finally:
            phases.leave()
            self._preparations.end(flight.sample)
        await self._end(group, flight)

    async def _end(self, group: GroupRun, flight: InFlight) -> None:
        try:
            await self._rollout.episodes.closed(flight)
        except asyncio.CancelledError:
            self._report(flight)
            raise
        due = group.end(flight)
        self._ended += 1
        try:
            if group.ended:
                due += await group.decide()
        except asyncio.CancelledError:
            for ended in [*group.finished, *(ended for ended, _ in due)]:
                self._report(ended)
            raise
        self._admission.note_end(group)
        group.pending_results += len(due)
        try:
            if len(due) == 1:
                await self._sink(due[0][1])
            elif due:
                # Together, so that they are stored together.
                await asyncio.gather(*(self._sink(result) for _, result in due))
            group.pending_results -= len(due)
            # Results may be taken in another order than trajectories ended.
            if self._group_sink is not None and group.closed and not group.pending_results:
                await self._group_sink(group.result)
        except asyncio.CancelledError:
            whole = group.closed and self._group_sink is not None
            for ended in group.finished if whole else [ended for ended, _ in due]:
                self._report(ended)
            raise

    def check_all_ended(self) -> None:
        """Check that every started trajectory has ended.

        Raises:
            TrajectoriesMissing: Some have not; the message has the counts.
        """
        if self._ended != self._begun:
            raise TrajectoriesMissing(
                f"{self._begun - self._ended} of the {self._begun} trajectories that were started have no result: "
                "neither stored nor failed"
            )

    def report_waiting(self) -> None:
        """Report trajectories that are complete but wait for a group that will not be completed."""
        for group in self._admission.open_groups:
            if self._group_sink is not None or group.holds_results:
                for flight in group.finished:
                    self._report(flight)

    def _report(self, flight: InFlight) -> None:
        if self._interrupted is None or flight in self._reported:
            return
        self._reported.add(flight)
        partial = flight.partial()
        if partial is not None:
            self._interrupted(partial)


class _Phases:
    """A barrier at the end of each phase of a turn; a trajectory that has ended no longer takes part.

    One task per trajectory with a barrier costs half as much as a new task per trajectory and phase.
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
            # A deadline passed while waiting: a trajectory that leaves must not be counted as arrived.
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
