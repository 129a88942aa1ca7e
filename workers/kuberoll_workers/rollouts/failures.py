"""Failures of trajectories, their retries and backoff. A failure is never a reward of 0."""

from __future__ import annotations

import random
from typing import Literal

from kuberoll_workers.data.plain import message_of, printable
from kuberoll_workers.data.record import FailureKind
from kuberoll_workers.data.tracebacks import Traceback, traceback_of
from kuberoll_workers.environments.outcome import EnvironmentFault, RowFault
from kuberoll_workers.policy.interface import PolicyRefused, PolicyUnavailable, UnknownTokens

Stage = Literal["prompt", "generation", "environment", "trajectory", "group"]
"""The part of the loop that failed.

`group`: the trajectory itself is fine, but another one of its group failed, or the group could not be scored.
"""


class TrajectoryFailed(Exception):
    """A trajectory failed permanently; the message has bounded length and is valid Unicode.

    Attributes:
        kind: The part at fault.
        stage: The stage that failed.
        tries: Number of attempts.
        traceback: Of an exception in an environment's code, or of an unexpected one.
    """

    def __init__(
        self, cause: str, *, kind: FailureKind, stage: Stage, tries: int, traceback: Traceback | None = None
    ) -> None:
        super().__init__(printable(cause))
        self.kind: FailureKind = kind
        self.stage: Stage = stage
        self.tries = tries
        self.traceback = traceback


def failure_of(error: BaseException, *, stage: Stage, tries: int) -> TrajectoryFailed:
    """Convert the last error of an operation into a typed failure."""
    kind: FailureKind
    traceback: Traceback | None = None
    if isinstance(error, PolicyRefused | RowFault):
        kind = "data"
    elif isinstance(error, PolicyUnavailable):
        kind = "infrastructure"
    elif isinstance(error, UnknownTokens):
        kind = "model"
    elif isinstance(error, EnvironmentFault):
        kind, traceback = "environment", error.traceback
    else:
        kind, traceback = "model" if stage == "generation" else "environment", traceback_of(error)
    text = message_of(error) or type(error).__name__
    return TrajectoryFailed(text, kind=kind, stage=stage, tries=tries, traceback=traceback)


def is_retryable(error: Exception) -> bool:
    """True if a retry of the same operation may succeed."""
    return isinstance(error, PolicyUnavailable | EnvironmentFault) and not isinstance(error, RowFault)


def backoff(tries: int, *, base: float, longest: float, draw: random.Random) -> float:
    """Seconds to wait after `tries` failed attempts: doubled each time, capped at `longest`, with jitter.

    The wait is drawn from the upper half of the interval, so that trajectories that failed together do not retry
    together.
    """
    # 2^40 times the shortest wait exceeds any limit, and more doublings would overflow.
    return min(longest, base * 2.0 ** min(tries - 1, 40)) * draw.uniform(0.5, 1.0)
