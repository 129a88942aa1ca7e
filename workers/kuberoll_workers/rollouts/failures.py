"""Why a trajectory could not be finished. A failure is never a reward of 0."""

from __future__ import annotations

import random
from typing import Literal

from kuberoll_workers.data.plain import message_of, printable
from kuberoll_workers.data.record import FailureKind
from kuberoll_workers.environments.outcome import EnvironmentFault, RowFault
from kuberoll_workers.policy.interface import PolicyRefused, PolicyUnavailable

Stage = Literal["prompt", "generation", "environment", "trajectory", "group"]
"""`group`: nothing is wrong with the trajectory itself, a sibling's failure took its group with it."""


class TrajectoryFailed(Exception):
    """A trajectory was given up; its message is of bounded length and valid Unicode.

    Attributes:
        kind: Who is at fault.
        stage: What was being done.
        tries: How often it was tried.
    """

    def __init__(self, cause: str, *, kind: FailureKind, stage: Stage, tries: int) -> None:
        super().__init__(printable(cause))
        self.kind: FailureKind = kind
        self.stage: Stage = stage
        self.tries = tries


def failure_of(error: BaseException, *, stage: Stage, tries: int) -> TrajectoryFailed:
    """The typed failure for what an operation raised at last."""
    kind: FailureKind
    if isinstance(error, PolicyRefused | RowFault):
        kind = "data"
    elif isinstance(error, PolicyUnavailable):
        kind = "infrastructure"
    elif isinstance(error, EnvironmentFault):
        kind = "environment"
    else:
        kind = "model" if stage == "generation" else "environment"
    text = message_of(error) or type(error).__name__
    return TrajectoryFailed(text, kind=kind, stage=stage, tries=tries)


def is_retryable(error: Exception) -> bool:
    """Whether the same operation may succeed when it is tried again."""
    return isinstance(error, PolicyUnavailable | EnvironmentFault) and not isinstance(error, RowFault)


def backoff(tries: int, *, base: float, longest: float, draw: random.Random) -> float:
    """Seconds to wait after so many failed tries: doubling, capped, and spread over its upper half.

    The jitter keeps a thousand trajectories that failed together from coming back together.
    """
    # 2^40 times the shortest wait is longer than any; more doublings would overflow.
    return min(longest, base * 2.0 ** min(tries - 1, 40)) * draw.uniform(0.5, 1.0)
