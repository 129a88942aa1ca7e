"""A worker's way of following what the consumer of its run allows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kuberoll_workers.data.intervals import IntervalSet
from kuberoll_workers.output.consumer_plan import ConsumerPlan, PlanUnreadable, read_plan
from kuberoll_workers.output.storage import DirectoryStorage, Storage
from kuberoll_workers.rollouts.admission import SampleAdmission
from kuberoll_workers.rollouts.pace import Pace

_LOCAL_SECONDS = 0.02
_LOCAL_IDLE_SECONDS = 0.2
_REMOTE_SECONDS = 1.0

_log = logging.getLogger(__name__)


class PlanFollower:
    """Reads the plan of a run's consumer, again and again, and takes it over.

    Attributes:
        plan: The newest plan; None: there is none yet.
        held_seconds: Seconds for which a group could have begun, and was not allowed to.
    """

    def __init__(self, storage: Storage, pace: Pace, *, shard: int, held: bool) -> None:
        """
        Args:
            shard: The only shard of this worker.
            held: True if nothing begins before there is a plan.
        """
        self._storage = storage
        self._pace = pace
        self._shard = shard
        self._held = held
        self._admission: SampleAdmission | None = None
        self._looked = time.monotonic()
        self._unreadable = ""
        self.plan: ConsumerPlan | None = None
        self.held_seconds = 0.0

    def watch(self, admission: SampleAdmission) -> None:
        """Take over the admission that is held back."""
        self._admission = admission

    @property
    def reason(self) -> str:
        """Why groups are held back; empty if none are."""
        if self._admission is None or not self._admission.held_back:
            return ""
        if self.plan is None:
            return (
                "no consumer has opened the run: groups begin when a trainer takes them, with "
                "kuberoll.trainer.Rollouts.open and batches"
            )
        counts = self.plan.counts
        return (
            f"consumer {self.plan.consumer!r} has taken {counts.taken_groups} prompt groups, with weights of version "
            f"{self.plan.version} as the newest, and does not allow more before it takes some or publishes weights"
        )

    async def follow(self, changed: Callable[[ConsumerPlan], None] = lambda _plan: None) -> None:
        """Follow the plan until cancelled.

        Args:
            changed: Called with each new plan.
        """
        local = isinstance(self._storage, DirectoryStorage)
        while True:
            await self._look(changed)
            held = self._admission is not None and self._admission.held_back
            now = time.monotonic()
            self.held_seconds += (now - self._looked) if held else 0.0
            self._looked = now
            await asyncio.sleep((_LOCAL_SECONDS if held else _LOCAL_IDLE_SECONDS) if local else _REMOTE_SECONDS)

    async def _look(self, changed: Callable[[ConsumerPlan], None]) -> None:
        try:
            plan = await asyncio.to_thread(read_plan, self._storage)
        except (PlanUnreadable, OSError) as error:
            # The next look may succeed; until then what was allowed stays allowed.
            if str(error) != self._unreadable:
                self._unreadable = str(error)
                _log.warning("the plan of the run's consumer cannot be read: %s", error)
            return
        if plan is None or plan == self.plan:
            return
        before, self.plan = self.plan, plan
        self._pace.update(
            version=plan.version,
            room=plan.room[self._shard] if plan.room is not None else (0 if self._held else None),
            settled=IntervalSet.of(plan.settled[self._shard]),
            stopped=plan.stopped,
        )
        if self._admission is not None and (before is None or plan.version != before.version):
            self._admission.stop_stale()
        changed(plan)
