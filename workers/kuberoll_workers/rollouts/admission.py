"""Admission of samples: they are taken from a source, which may be endless, only when a slot is free."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Iterable
from typing import TypeVar

from kuberoll_workers.data.prompts import Sample, SampleGroup
from kuberoll_workers.rollouts.groups import GroupPolicy, GroupQuota, GroupRun
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.pace import Pace
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.run_ahead import RunAhead

_Result = TypeVar("_Result")


class Drain(asyncio.Event):
    """An event that stops admission: trajectories in flight are finished, and no new ones are started."""


class SampleAdmission:
    """Starts trajectories for free slots, in the order of the source.

    Attributes:
        open_groups: Groups that are not complete yet.
    """

    def __init__(
        self,
        rollout: Rollout,
        groups: Iterable[SampleGroup] | AsyncIterable[SampleGroup],
        policy: GroupPolicy,
        drain: Drain,
        run_ahead: RunAhead | None = None,
        pace: Pace | None = None,
    ) -> None:
        """
        Args:
            run_ahead: Bounds the trajectories that have been started and not read; None: nobody reads them.
            pace: What the run's consumer allows; None: everything.
        """
        self._rollout = rollout
        self.policy = policy
        self._drain = drain
        self._run_ahead = run_ahead if run_ahead is not None else RunAhead()
        self._quota = GroupQuota(policy)
        # One of the two: a source that is waited for, or not.
        self._stream = aiter(groups) if isinstance(groups, AsyncIterable) else None
        self._iterator = iter(()) if isinstance(groups, AsyncIterable) else iter(groups)
        self._pull = asyncio.Lock()
        self._ended = asyncio.Event()
        # Whether something has changed since `upcoming` was asked, and whether anybody waits for that: mostly nobody
        # does, and each trajectory would set the event.
        self._is_changed = self._is_watched = False
        self._changed = asyncio.Event()
        # The source has no more groups, or has raised an error, which whoever needs the next group is to have.
        self._is_over = False
        self._error: Exception | None = None
        # Taken from the source, and not begun.
        self._taken: deque[SampleGroup] = deque()
        self._newest: GroupRun | None = None
        self._pace = pace
        # The next one, which has a place and is not allowed to begin yet.
        self._held: SampleGroup | None = None
        self.open_groups: set[GroupRun] = set()

    async def next(self, *, wait: bool = True, room: int = 1) -> tuple[GroupRun, InFlight] | None:
        """Start the next trajectory; return it with its group, or None when there are no more.

        Args:
            wait: Whether to wait for the reader, and until the groups in flight decide if another one is needed; else
                return None.
            room: Number of trajectories for which there must be room, one of which is started.
        """
        while not self._drain.is_set():
            if (run := self._unstarted()) is None and self._is_over and self.exhausted:
                return None
            if run is not None and self._has_room(run, room):
                flight = run.begin()
                assert flight is not None
                self._is_changed = True
                if self._is_watched:
                    self._changed.set()
                return run, flight
            # One at a time waits; the others queue behind it.
            async with self._pull:
                run = self._unstarted()
                if not self._has_room(run, room):
                    if not wait:
                        return None
                    await self._unless_drained(self._run_ahead.next_read().wait())
                elif run is None and not self.exhausted:
                    if self._quota.has_room(1):
                        if not await self._pull_group(wait=wait):
                            return None
                    elif not wait or not self.open_groups:
                        return None
                    else:
                        self._ended.clear()
                        await self._ended.wait()
        return None

    def _unstarted(self) -> GroupRun | None:
        """The group whose samples have not all been started; None: a group must be taken from the source."""
        return self._newest if self._newest is not None and self._newest.has_more else None

    def _has_room(self, run: GroupRun | None, wanted: int) -> bool:
        return self._run_ahead.has_room(of_group=0 if run is None else run.started, wanted=wanted)

    def note_end(self, run: GroupRun) -> None:
        """Record that a trajectory of a group has ended. Call it once for each trajectory that `next` returned."""
        if run.closed:
            self.open_groups.discard(run)
        self._ended.set()
        self._is_changed = True
        if self._is_watched:
            self._changed.set()

    def upcoming(self, count: int) -> list[Sample]:
        """Samples that begin next, in this order, if there were places for them now.

        Groups are taken from the source for that, if it need not be waited for.

        Returns:
            At most `count`, and none that may not begin: before its consumer allows it, before results are read, beyond
            the groups that are needed, or after a drain.
        """
        self._is_changed = False
        self._changed.clear()
        if self._drain.is_set():
            return []
        count = int(min(count, max(0.0, self._run_ahead.limit - self._run_ahead.unread)))
        found = list(self._newest.unstarted(count)) if self._newest is not None else []
        number = 0
        while len(found) < count and self._quota.has_room(number + 1):
            if number == len(self._taken) and not self._take():
                break
            group = self._taken[number]
            if self._pace is not None and (self._pace.stopped or not self._allows(self._pace, group)):
                break
            found += group.samples[: count - len(found)]
            number += 1
        return found

    async def change(self) -> None:
        """Wait until `upcoming` may have other samples than when it was last asked."""
        if self._is_changed:
            return
        self._is_watched = True
        events = [self._changed, self._run_ahead.next_read()]
        if self._pace is not None:
            events.append(self._pace.next_change())
        if not self._drain.is_set():
            events.append(self._drain)
        waiting = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    @property
    def exhausted(self) -> bool:
        """True when there are no more groups than those that have begun."""
        return self._is_over and not self._taken and self._error is None

    @property
    def all_begun(self) -> bool:
        """True if there is nothing left to start."""
        return self.exhausted and self._unstarted() is None

    @property
    def held_back(self) -> bool:
        """True if a group is ready to begin, and the run's consumer does not allow it yet."""
        return self._held is not None and self._pace is not None and not self._allows(self._pace, self._held)

    async def _pull_group(self, *, wait: bool) -> bool:
        """Begin the next group of the source; False if it may not begin yet, and is not to be waited for."""
        if (pace := self._pace) is not None and pace.stopped:
            self._held, self._is_over, self._error = None, True, None
            self._taken.clear()
            return True
        if not self._taken:
            if self._stream is not None:
                self._keep(await self._unless_drained(anext(self._stream, None)))
            elif not self._take() and self._error is not None:
                raise self._error
        group = self._taken[0] if self._taken else None
        if group is not None and pace is not None and not self._allows(pace, group):
            self._held = group
            if wait:
                await self._unless_drained(pace.next_change().wait())
            return wait
        self._held = None
        if group is not None:
            self._taken.popleft()
            self._quota.begin()
            self._newest = GroupRun(group, self.policy, self._quota, self._rollout, self._run_ahead)
            self.open_groups.add(self._newest)
        return True

    def _take(self) -> bool:
        """Take a group from a source that need not be waited for; False if there is none."""
        if self._is_over or self._stream is not None:
            return False
        try:
            return self._keep(next(self._iterator, None))
        except Exception as error:
            self._is_over, self._error = True, error
            return False

    def _keep(self, group: SampleGroup | None) -> bool:
        if group is None:
            self._is_over = True
            return False
        self._taken.append(group)
        return True

    @staticmethod
    def _allows(pace: Pace, group: SampleGroup) -> bool:
        return group.order is None or pace.may_begin(group.order)

    def stop_stale(self) -> None:
        """Stop the groups whose oldest token is too old for the run's consumer."""
        if self._pace is not None:
            for group in tuple(self.open_groups):
                if self._pace.is_stale(group.oldest_version):
                    group.stop_stale()

    async def _unless_drained(self, awaited: Awaitable[_Result]) -> _Result | None:
        # It may take a long time, and draining must not wait for it.
        async def wait() -> _Result:
            return await awaited

        waiting = asyncio.ensure_future(wait())
        drained = asyncio.ensure_future(self._drain.wait())
        try:
            await asyncio.wait((waiting, drained), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (waiting, drained):
                task.cancel()
            await asyncio.wait((waiting, drained))
        return None if waiting.cancelled() else waiting.result()
