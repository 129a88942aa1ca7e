"""A trajectory in flight: its deadline, its failure, its episode, and its record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Token
from types import TracebackType
from typing import Any

from kuberoll_workers.data.causes import Cause
from kuberoll_workers.data.incidents import RESENT, IncidentLog, Sequel, united
from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.data.record import (
    DroppedRecord,
    FailureRecord,
    Partial,
    TrajectoryRecord,
    set_turns_to_score,
)
from kuberoll_workers.data.stop_reasons import DropReason
from kuberoll_workers.environments.executor import is_cancelled
from kuberoll_workers.rollouts.failures import Stage, TrajectoryFailed, failure_of, leaves_unscored
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
        restorable: A later attempt can go on after its turns: its environment can restore the state of its episode.
        waiting_since: Start of its wait for the next generation or step, by the event loop's clock.
        waiting_seconds: Seconds that it waited before the generation of this turn.
        deferred: Its record waits for its group.
        deadline: Time of the event loop at which it fails; None: no limit.
        failure: Why it failed; None: it has not.
        incidents: What went wrong on its way.
        drop_reason: Why it is dropped; None: it is not.
    """

    __slots__ = (
        "_accounted",
        "_began",
        "_ended",
        "_over",
        "_resent",
        "_seconds",
        "_timeout",
        "_wasted",
        "closing",
        "deadline",
        "deferred",
        "drop_reason",
        "episode",
        "failure",
        "faults",
        "incidents",
        "losses",
        "lost",
        "metrics",
        "restorable",
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
        self.restorable = True
        self.deferred = deferred
        self.metrics = metrics
        self._seconds = seconds
        self._ended = ended
        now = asyncio.get_running_loop().time()
        self.started = self.waiting_since = now
        # What it has generated so far began then; of the time since, so many seconds are those of incidents, up to a
        # moment. Each second is thrown away once, whatever happens in it.
        self._began = self._accounted = self._over = now
        self._wasted = 0.0
        self._resent: Token[Any] | None = None
        earlier = () if sample.partial is None else united(turn.incidents for turn in sample.partial.turns)
        self.incidents = IncidentLog(earlier, noted=metrics.record_incident)
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
            self._over = asyncio.get_running_loop().time()
        else:
            self.drop_reason = reason
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def note_incident(
        self,
        cause: Cause,
        text: str,
        *,
        stage: Stage,
        sequel: Sequel,
        since: float | None = None,
        pause: float = 0.0,
        tokens: int = 0,
    ) -> None:
        """Note what went wrong now, and goes on; see `Incident`.

        Args:
            since: When what is thrown away began, by the event loop's clock; None: with its wait for this generation
                or step.
            pause: Seconds until it goes on.
        """
        now = asyncio.get_running_loop().time()
        began = max(self.waiting_since if since is None else since, self._accounted)
        seconds = max(0.0, now + pause - began)
        self._accounted = now + pause
        self._wasted += seconds
        self._note(cause, text, stage=stage, sequel=sequel, seconds=seconds, tokens=tokens)

    def note_restart(self, cause: Cause, text: str, *, stage: Stage, tokens: int | None = None) -> None:
        """Note that it is about to start over, and what that throws away.

        Args:
            tokens: Generated tokens; None: those that it has.
        """
        lost = self.trajectory.generated_tokens if tokens is None else tokens
        now = asyncio.get_running_loop().time()
        seconds = self._unaccounted(now)
        self._began = self._accounted = now
        self._wasted = 0.0
        self._note(cause, text, stage=stage, sequel="started over", seconds=seconds, tokens=lost)
        self.incidents.forget_journal()

    def _unaccounted(self, end: float) -> float:
        """Seconds of what it has generated so far, without those of incidents."""
        return max(0.0, end - self._began - self._wasted)

    def _note(
        self, cause: Cause, text: str, *, stage: Stage, sequel: Sequel, seconds: float = 0.0, tokens: int = 0
    ) -> None:
        turn = self.trajectory.turn + (stage == "generation")
        self.incidents.note(
            cause, text, stage=stage, sequel=sequel, turn=turn, at=time.time(), seconds=seconds, tokens=tokens
        )

    def note_interruption(self, partial: Partial) -> None:
        """Note that it was interrupted, and what of it is not used again."""
        lost = 0
        if not self.trajectory.turn:
            messages = [message for turn in partial.turns for message in turn.messages if message.sampled]
            lost = sum(len(message.token_ids) for message in messages)
        text = f"it was interrupted after turn {len(partial.turns)}"
        sequel: Sequel = "started over" if lost else "resumed"
        self._note(Cause("Interrupted"), text, stage="trajectory", sequel=sequel, tokens=lost)

    def _note_resent(self, cause: Cause, text: str, seconds: float) -> None:
        since = asyncio.get_running_loop().time() - seconds
        self.note_incident(cause, text, stage="generation", sequel="sent again", since=since)

    def partial(self) -> Partial | None:
        """The complete turns so far, with all incidents; None if there are none."""
        found = self.trajectory.partial()
        if found is not None:
            found.turns[0].incidents = [*self.incidents.all] or None
        return found

    # A generator would take half a kilobyte more for each trajectory.
    async def __aenter__(self) -> None:
        self._resent = RESENT.set(self._note_resent)
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
            assert self._resent is not None
            RESENT.reset(self._resent)
            self._ended(self, interrupted)

    def _failure_of(self, error: Exception | asyncio.CancelledError, *, expired: bool) -> TrajectoryFailed:
        if isinstance(error, TrajectoryFailed):
            return error
        if isinstance(error, PrefixBroken):
            self.metrics.record_prefix_violation()
            return TrajectoryFailed(str(error), reason="TokensChanged", stage="trajectory")
        if expired and not isinstance(error, asyncio.CancelledError):
            limit = self._seconds or 0.0
            cause = f"the trajectory took longer than rollout.timeouts.trajectorySeconds ({limit:g} s)"
            return TrajectoryFailed(cause, reason="TrajectoryDeadline", stage="trajectory")
        return failure_of(error, stage="trajectory", tries=1)

    def _fail(self, failure: TrajectoryFailed) -> None:
        # `stop` has recorded the reason already; an error caused by stopping is of no interest.
        if self.failure is None and self.drop_reason is None:
            self.failure = failure
            self._over = asyncio.get_running_loop().time()

    def result(self) -> TrajectoryRecord | FailureRecord | DroppedRecord:
        """The record of a trajectory that has ended."""
        record: TrajectoryRecord | FailureRecord
        trajectory = self.trajectory
        if self.failure is not None:
            record = trajectory.failure_record(self.failure)
            record.seconds = round(self._unaccounted(self._over), 3)
            if self.restorable and leaves_unscored(
                self.failure,
                turns=trajectory.turn,
                awaits_step=trajectory.awaits_step,
                ended=trajectory.stop_reason is not None,
            ):
                set_turns_to_score(record, trajectory.turns_to_score())
                # Nothing of it is thrown away.
                record.seconds, record.tokens = 0.0, 0
        elif self.drop_reason is not None:
            return self.dropped(self.drop_reason)
        else:
            record = trajectory.record()
        record.incidents = [*self.incidents.all] or None
        return record

    def dropped(self, reason: DropReason) -> DroppedRecord:
        """The record of a trajectory that is not wanted, whether it has finished or not."""
        record = self.trajectory.dropped_record(reason)
        record.incidents = [*self.incidents.all] or None
        return record

    def count_result(self, result: TrajectoryRecord | FailureRecord | DroppedRecord) -> None:
        """Count the result in the metrics."""
        self.metrics.flush_if_due()
        if isinstance(result, FailureRecord):
            failure = self.failure
            assert failure is not None
            self.metrics.record_failure(
                kind=failure.kind, stage=failure.stage, seconds=result.seconds or 0.0, tokens=result.tokens or 0
            )
        elif isinstance(result, DroppedRecord):
            self.metrics.record_drop(reason=result.reason, tokens=result.tokens.generated)
        else:
            self.metrics.record_finish(
                stop_reason=result.stop_reason,
                reward=result.total_reward,
                turns=result.turn_count,
                seconds=asyncio.get_running_loop().time() - self.started,
            )
