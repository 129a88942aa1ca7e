"""A trajectory in flight: its deadline, its failure, its episode, and its record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import DropReason
from kuberoll_workers.environments.executor import is_cancelled
from kuberoll_workers.rollouts.failures import TrajectoryFailed, failure_of
from kuberoll_workers.rollouts.metrics import EnvironmentMetrics
from kuberoll_workers.rollouts.trajectory import PrefixBroken, Trajectory


class InFlight:
    """A trajectory in flight, with its deadline and what ended it; the context in which it is played.

    Attributes:
        sample: Its sample, as the source gave it.
        closing: Completes when its episode is closed, after its end; None: there is nothing to close.
        episode: Name of its episode; None: its environment has none.
        lost: The episode's state is unknown.
        losses: Number of times that its episode was lost through no fault of its own.
        faults: Number of failed steps by turn, if a failed step makes it start over.
        waiting_since: Start of its wait for the next generation or step, by the event loop's clock.
        waiting_seconds: Seconds that it waited before the generation of this turn.
        deferred: Its record waits for its group.
        deadline: Time of the event loop at which it fails; None: no limit.
        failure: Why it failed; None: it has not.
        drop_reason: Why it is dropped; None: it is not.
    """

    __slots__ = (
        "_ended",
        "_seconds",
        "_timeout",
        "closing",
        "deadline",
        "deferred",
        "drop_reason",
        "episode",
        "failure",
        "faults",
        "losses",
        "lost",
        "metrics",
        "sample",
        "session",
        "started",
        "trajectory",
        "waiting_seconds",
        "waiting_since",
    )

    def __init__(
        self,
        sample: Sample,
        trajectory: Trajectory,
        *,
        metrics: EnvironmentMetrics,
        seconds: float | None,
        deferred: bool,
        ended: Callable[[InFlight, bool], None],
    ) -> None:
        """
        Args:
            seconds: Time limit of the trajectory; None: none.
            ended: Called when it has ended, with True if the run was ended before it.
        """
        self.sample = sample
        self.trajectory = trajectory
        self.episode: str | None = None
        self.closing: asyncio.Future[None] | None = None
        self.lost = False
        self.losses = 0
        self.faults: dict[int, int] = {}
        self.deferred = deferred
        self.metrics = metrics
        self._seconds = seconds
        self._ended = ended
        now = asyncio.get_running_loop().time()
        self.started = self.waiting_since = now
        self.waiting_seconds = 0.0
        self.session: str | None = None
        self.deadline = None if seconds is None else now + seconds
        self.failure: TrajectoryFailed | None = None
        self.drop_reason: DropReason | None = None
        self._timeout: asyncio.Timeout | None = None

    @property
    def is_over(self) -> bool:
        return self.failure is not None or self.drop_reason is not None or self.trajectory.stop_reason is not None

    def stop(self, reason: DropReason | TrajectoryFailed) -> None:
        """Stop it at once, cancelling what it waits for; does nothing if it has ended.

        Args:
            reason: Why it is dropped, or the failure of its group.
        """
        if self.is_over:
            return
        if isinstance(reason, TrajectoryFailed):
            self.failure = reason
        else:
            self.drop_reason = reason
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    # A generator would take half a kilobyte more for each trajectory.
    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout_at(self.deadline)
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Convert any error of the body into this trajectory's own failure, so that others are not affected."""
        timeout = self._timeout
        assert timeout is not None
        interrupted = False
        try:
            try:
                await timeout.__aexit__(kind, error, trace)
            except TimeoutError as expired:
                error = expired
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                interrupted = True
                return False
            # User code may raise CancelledError, too, when nobody has cancelled this task.
            if not isinstance(error, Exception | asyncio.CancelledError):
                return False
            self._fail(self._failure_of(error, expired=timeout.expired()))
            return True
        finally:
            self._timeout = None
            self._ended(self, interrupted)

    def _failure_of(self, error: Exception | asyncio.CancelledError, *, expired: bool) -> TrajectoryFailed:
        if isinstance(error, TrajectoryFailed):
            return error
        if isinstance(error, PrefixBroken):
            self.metrics.record_prefix_violation()
            return TrajectoryFailed(str(error), kind="model", stage="trajectory", tries=1)
        if expired and not isinstance(error, asyncio.CancelledError):
            limit = self._seconds or 0.0
            cause = f"the trajectory took longer than rollout.timeouts.trajectorySeconds ({limit:g} s)"
            return TrajectoryFailed(cause, kind="infrastructure", stage="trajectory", tries=1)
        return failure_of(error, stage="trajectory", tries=1)

    def _fail(self, failure: TrajectoryFailed) -> None:
        # `stop` has recorded the reason already; an error caused by stopping is of no interest.
        if self.failure is None and self.drop_reason is None:
            self.failure = failure

    def result(self) -> TrajectoryRecord | FailureRecord | DroppedRecord:
        """The record of a trajectory that has ended."""
        if self.failure is not None:
            return self.trajectory.failure_record(self.failure)
        if self.drop_reason is not None:
            return self.trajectory.dropped_record(self.drop_reason)
        return self.trajectory.record()

    def count_result(self, result: TrajectoryRecord | FailureRecord | DroppedRecord) -> None:
        """Count the result in the metrics."""
        self.metrics.flush_if_due()
        if isinstance(result, FailureRecord):
            failure = self.failure
            assert failure is not None
            self.metrics.record_failure(kind=failure.kind, stage=failure.stage)
        elif isinstance(result, DroppedRecord):
            self.metrics.record_drop(reason=result.reason, tokens=result.tokens.generated)
        else:
            self.metrics.record_finish(
                stop_reason=result.stop_reason,
                reward=result.total_reward,
                turns=result.turn_count,
                seconds=asyncio.get_running_loop().time() - self.started,
            )
