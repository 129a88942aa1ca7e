"""Failures of trajectories, their retries and backoff. A failure is never a reward of 0."""

from __future__ import annotations

import random
from typing import Literal

from kuberoll_workers.data.causes import REASONS, Cause, FailureKind, ReasonName
from kuberoll_workers.data.plain import message_of, printable
from kuberoll_workers.data.tracebacks import Traceback, traceback_of
from kuberoll_workers.environments.exception_causes import cause_of
from kuberoll_workers.environments.outcome import EnvironmentFault, RowFault
from kuberoll_workers.policy.interface import PolicyError, PolicyUnavailable

Stage = Literal["prompt", "generation", "environment", "trajectory", "group"]
"""The part of the loop that failed.

`group`: the trajectory itself is fine, but another one of its group failed, or the group could not be scored.
"""


class TrajectoryFailed(Exception):
    """A trajectory failed permanently; the message has bounded length and is valid Unicode.

    Attributes:
        cause: Why, and what shows it.
        stage: The stage that failed.
        tries: Number of attempts.
        traceback: Of an exception in an environment's code, or of an unexpected one.
    """

    def __init__(
        self,
        text: str,
        *,
        reason: ReasonName | Cause,
        stage: Stage,
        tries: int = 1,
        traceback: Traceback | None = None,
    ) -> None:
        super().__init__(printable(text))
        self.cause = reason if isinstance(reason, Cause) else Cause(reason)
        self.stage: Stage = stage
        self.tries = tries
        self.traceback = traceback

    @property
    def kind(self) -> FailureKind:
        """Whose doing it is."""
        return self.cause.kind


def failure_of(error: BaseException, *, stage: Stage, tries: int) -> TrajectoryFailed:
    """Convert the last error of an operation into a typed failure."""
    traceback: Traceback | None = None
    if isinstance(error, EnvironmentFault):
        traceback = error.traceback
    elif not isinstance(error, PolicyError):
        traceback = traceback_of(error)
    text = message_of(error) or type(error).__name__
    return TrajectoryFailed(text, reason=cause_of_error(error), stage=stage, tries=tries, traceback=traceback)


def cause_of_error(error: BaseException) -> Cause:
    """The cause of an operation's error. What is neither the policy's error nor the environment's is ours."""
    if isinstance(error, EnvironmentFault | PolicyError | TrajectoryFailed):
        return error.cause
    found = cause_of(error)
    return Cause("Unexpected") if found.reason == "EnvironmentRaised" else found


def is_retryable(error: Exception) -> bool:
    """True if a retry of the same operation may succeed."""
    return isinstance(error, PolicyUnavailable | EnvironmentFault) and not isinstance(error, RowFault)


def leaves_unscored(failure: TrajectoryFailed, *, turns: int, awaits_step: bool, ended: bool) -> bool:
    """True if all that a failed trajectory lacks is a score: a later attempt need not generate its turns again.

    Its group could not be scored, or the environment could not take its newest response for a reason that lies in none
    of its turns. Of the first response that holds for any fault of the environment, which has answered nothing before.

    Args:
        turns: Number of its responses.
        awaits_step: The environment has not taken the newest one.
        ended: It has ended, and waited for its group.
    """
    if failure.stage == "group":
        return turns > 0 and ended
    if not awaits_step:
        return False
    return REASONS[failure.cause.reason].keeps_turns or (turns == 1 and failure.kind == "environment")


def backoff(tries: int, *, base: float, longest: float, draw: random.Random) -> float:
    """Seconds to wait after `tries` failed attempts: doubled each time, capped at `longest`, with jitter.

    The wait is drawn from the upper half of the interval, so that trajectories that failed together do not retry
    together.
    """
    # 2^40 times the shortest wait exceeds any limit, and more doublings would overflow.
    return min(longest, base * 2.0 ** min(tries - 1, 40)) * draw.uniform(0.5, 1.0)
