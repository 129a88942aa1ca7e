"""A worker's way of following what the consumer of its run allows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kuberoll_workers.data.intervals import IntervalSet
from kuberoll_workers.output.consumer_plan import ConsumerPlan, read_plan
from kuberoll_workers.output.storage import DirectoryStorage, Storage
from kuberoll_workers.rollouts.admission import SampleAdmission
from kuberoll_workers.rollouts.pace import Pace
from kuberoll_workers.telemetry.consumer import ConsumerMetrics

_LOCAL_SECONDS = 0.02
_LOCAL_IDLE_SECONDS = 0.2
_REMOTE_SECONDS = 1.0
# Waiting for each other for a moment is how a trainer and its rollouts work.
_NOTABLE_SECONDS = 5.0

_log = logging.getLogger(__name__)


class PaceReport(NamedTuple):
    """Who waits for whom.

    Attributes:
        held: Why this worker begins nothing; empty: it does.
        starved: Why the trainer waits; empty: it does not.
    """

    held: str = ""
    starved: str = ""


class PlanFollower:
    """Reads the plan of a run's consumer, again and again, and takes it over."""

    def __init__(
        self,
        storage: Storage,
        pace: Pace,
        *,
        shard: int,
        shards: int,
        held: bool,
        metrics: ConsumerMetrics,
        report: Callable[[PaceReport], None],
        written: asyncio.Event | None = None,
        serve: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            shard: The only shard of this worker.
            shards: Number of shards of the run.
            held: True if nothing begins before there is a plan.
            report: Called whenever who waits for whom has changed.
            written: Set when somebody knows of a new plan, which is then read at once.
            serve: Has the worker's own engine serve a version, before anything begins with it; None: others do.
        """
        self._storage = storage
        self._pace = pace
        self._shard = shard
        self._shards = shards
        self._held = held
        self._metrics = metrics
        self._report = report
        self._written = written
        self._serve = serve
        self._reported = PaceReport()
        self._admission: SampleAdmission | None = None
        self._plan: ConsumerPlan | None = None
        self._unreadable = ""
        self._first = True
        self._held_since: float | None = None

    def watch(self, admission: SampleAdmission) -> None:
        """Take over the admission that is held back."""
        self._admission = admission

    async def follow(self) -> None:
        """Follow the plan until cancelled."""
        local = isinstance(self._storage, DirectoryStorage)
        looked = time.monotonic()
        while True:
            await self._look()
            held = self._admission is not None and self._admission.held_back
            now = time.monotonic()
            if held and self._held_since is not None:
                self._metrics.hold(now - looked)
            looked = now
            self._held_since = (now if self._held_since is None else self._held_since) if held else None
            self._tell(now)
            await self._pause((_LOCAL_SECONDS if held else _LOCAL_IDLE_SECONDS) if local else _REMOTE_SECONDS)

    async def _pause(self, seconds: float) -> None:
        if self._written is None:
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._written.wait()
        self._written.clear()

    async def _look(self) -> None:
        first, self._first = self._first, False
        try:
            plan = await asyncio.to_thread(read_plan, self._storage, shards=self._shards)
        except Exception as error:
            # Stores have exceptions of their own. The next look may succeed; until then what was allowed stays allowed.
            if str(error) != self._unreadable:
                self._unreadable = str(error)
                _log.warning("the plan of the run's consumer cannot be read: %s", error)
            return
        if plan is None or plan == self._plan:
            return
        before, self._plan = self._plan, plan
        if self._serve is not None and plan.version != self._pace.version:
            await self._serve(plan.version)
        self._pace.update(
            version=plan.version,
            room=plan.room[self._shard] if plan.room is not None else (0 if self._held else None),
            settled=IntervalSet.of(plan.settled[self._shard]),
            stopped=plan.stopped,
        )
        if self._admission is not None and (before is None or plan.version != before.version):
            self._admission.stop_stale()
        if self._shard == 0:
            self._metrics.update(plan.counts, since_start=first)

    def _tell(self, now: float) -> None:
        held = self._held_since is not None and now - self._held_since >= _NOTABLE_SECONDS
        report = PaceReport(held=self._why_held() if held else "", starved=self._why_starved())
        if report != self._reported:
            self._reported = report
            self._report(report)

    def _why_held(self) -> str:
        if self._plan is None:
            return (
                "no trainer has opened the run: prompt groups begin when one takes them, with "
                "kuberoll.trainer.Rollouts.open and batches"
            )
        return (
            f"the trainer {self._plan.consumer!r} has taken {self._plan.counts.taken_groups} prompt groups, its newest "
            f"weights are version {self._plan.version}, and no more groups may begin before it takes some or publishes"
        )

    def _why_starved(self) -> str:
        if self._plan is None or not self._plan.waiting:
            return ""
        return (
            f"the trainer {self._plan.consumer!r} waits for prompt groups; {self._plan.counts.ready_groups} are ready"
        )
