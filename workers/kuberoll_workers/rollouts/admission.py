"""Admission of samples: they are taken from a source, which may be endless, only when a slot is free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

from kuberoll_workers.data.prompts import SampleGroup
from kuberoll_workers.rollouts.groups import GroupPolicy, GroupQuota, GroupRun
from kuberoll_workers.rollouts.rollout import InFlight, Rollout


class Drain(asyncio.Event):
    """An event that stops admission: trajectories in flight are finished, and no new ones are started."""


class SampleAdmission:
    """Starts trajectories for free slots, in the order of the source.

    Attributes:
        open_groups: Groups that are not complete yet.
        exhausted: True when the source has no more groups.
    """

    def __init__(
        self,
        rollout: Rollout,
        groups: Iterable[SampleGroup] | AsyncIterable[SampleGroup],
        policy: GroupPolicy,
        drain: Drain,
    ) -> None:
        self._rollout = rollout
        self.policy = policy
        self._drain = drain
        self._quota = GroupQuota(policy)
        self._source: Iterator[SampleGroup] | AsyncIterator[SampleGroup] = (
            aiter(groups) if isinstance(groups, AsyncIterable) else iter(groups)
        )
        self._pull = asyncio.Lock()
        self._ended = asyncio.Event()
        self.exhausted = False
        self._newest: GroupRun | None = None
        self.open_groups: set[GroupRun] = set()

    async def next(self, *, wait: bool = True) -> tuple[GroupRun, InFlight] | None:
        """Start the next trajectory; return it with its group, or None when there are no more.

        Args:
            wait: Whether to wait until the groups in flight decide if another one is needed; else return None.
        """
        while not self._drain.is_set():
            if self._newest is not None and (flight := self._newest.begin()) is not None:
                return self._newest, flight
            if self.exhausted:
                return None
            async with self._pull:
                if self._newest is not None and self._newest.has_more:
                    continue
                if self.exhausted:
                    return None
                if not self._quota.open:
                    if not wait or not self.open_groups:
                        return None
                    self._ended.clear()
                    await self._ended.wait()
                    continue
                group = await self._next_group()
                if group is None:
                    continue
                self._quota.begin()
                self._newest = GroupRun(group, self.policy, self._quota, self._rollout)
                self.open_groups.add(self._newest)
        return None

    def note_end(self, run: GroupRun) -> None:
        """Record that a trajectory of a group has ended. Call it once for each trajectory that `next` returned."""
        if run.closed:
            self.open_groups.discard(run)
        self._ended.set()

    async def _next_group(self) -> SampleGroup | None:
        group: SampleGroup | None
        if isinstance(self._source, AsyncIterator):
            group = await self._unless_drained(self._source)
        else:
            group = next(self._source, None)
        self.exhausted = group is None
        return group

    async def _unless_drained(self, source: AsyncIterator[SampleGroup]) -> SampleGroup | None:
        # A source may block for a long time, and draining must not wait for it.
        async def pull() -> SampleGroup | None:
            return await anext(source, None)

        pulled = asyncio.ensure_future(pull())
        drained = asyncio.ensure_future(self._drain.wait())
        try:
            await asyncio.wait((pulled, drained), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pulled, drained):
                task.cancel()
            await asyncio.wait((pulled, drained))
        return None if pulled.cancelled() else pulled.result()
