"""Whose doing a failure is: the one table of reasons, and the evidence that a failure carries.

What fails names its reason; what counts, stores or explains failures asks this table. A new reason is a row here.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from kuberoll_workers.data.plain import printable

FailureKind = Literal["policy", "environment", "infrastructure", "data", "operator"]
"""Whose doing a failure is: the policy's response; the environment's code; machines, networks, engines and services;
the dataset's row; or a limit that whoever runs the job has set."""

KINDS_OF_OLD: Final[Mapping[str, FailureKind]] = MappingProxyType({"model": "policy"})
"""Kinds in records of older versions, and what they are called now."""

MAX_WORD: Final = 200
"""Maximum length of a name in the evidence, in characters."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something failed.

    Attributes:
        kind: Whose doing it is.
        words: What happened, a sentence without its end.
        keeps_turns: The turns before are not in doubt: a later attempt goes on after them. A failure of an environment,
            a row or a response may have been caused by an earlier turn, so that its trajectory starts over.
    """

    kind: FailureKind
    words: str
    keeps_turns: bool


REASONS: Final[Mapping[str, Reason]] = MappingProxyType(
    {
        "PolicyUnreachable": Reason("infrastructure", "no engine could be reached", True),
        "PolicySilent": Reason("infrastructure", "the engine did not answer in time", True),
        "PolicyOverloaded": Reason("infrastructure", "the engine was overloaded", True),
        "PolicyFailed": Reason("infrastructure", "the engine failed", True),
        "PolicyLost": Reason("infrastructure", "the engine's replica was lost", True),
        "InvalidAnswer": Reason("infrastructure", "the engine's answer was not a valid one", True),
        "TokensChanged": Reason("infrastructure", "KubeRoll changed tokens of its own: please report it", False),
        "Unexpected": Reason("infrastructure", "KubeRoll failed unexpectedly: please report it", False),
        "EpisodeLost": Reason("infrastructure", "the instance that held the episode is gone", True),
        "EnvironmentUnreachable": Reason("infrastructure", "no server of the environment could be reached", True),
        "ProcessKilled": Reason("infrastructure", "the environment's process was killed from outside", True),
        "NotStarted": Reason("infrastructure", "the environment's process could not be started", True),
        "DependencyUnavailable": Reason("infrastructure", "a service that the environment needs was down", True),
        "ResourceExhausted": Reason("infrastructure", "the machine ran out of a resource", True),
        "SandboxLost": Reason("infrastructure", "the sandbox was lost", True),
        "SandboxUnavailable": Reason("infrastructure", "no sandbox could be started", True),
        "ImageUnavailable": Reason("infrastructure", "an image could not be fetched", True),
        "StorageFailed": Reason("infrastructure", "the run's output could not be written", True),
        "EnvironmentRaised": Reason("environment", "the environment's code raised an exception", False),
        "EnvironmentCrashed": Reason("environment", "the environment's process ended by itself", False),
        "EnvironmentSilent": Reason("environment", "the environment did not answer in time", False),
        "EnvironmentInvalid": Reason("environment", "the environment's answer was not a valid one", False),
        "NotRepeatable": Reason("environment", "the environment answered a replay otherwise than before", False),
        "MessagesRefused": Reason("environment", "the chat template refuses the environment's messages", False),
        "RowUnusable": Reason("data", "the environment cannot use the row", False),
        "ImageRefused": Reason("data", "there is no such image, or it cannot be used", False),
        "RequestRefused": Reason("data", "the engine refuses the request", False),
        "PromptRefused": Reason("data", "the chat template refuses the messages", False),
        "RowChanged": Reason("data", "the dataset's row is not the one that the trajectory was made of", False),
        "PromptMissing": Reason("data", "there is no prompt", False),
        "JobRefused": Reason("data", "the job asks for what there is not", False),
        "UnknownTokens": Reason("policy", "the policy sampled ids that are no tokens", False),
        "TurnDeadline": Reason("operator", "the turn's time limit was over", True),
        "TrajectoryDeadline": Reason("operator", "the trajectory's time limit was over", True),
        "AccessRefused": Reason("operator", "the credentials that the job gives were refused", True),
        "Interrupted": Reason("operator", "its worker ended before it, and another one went on", True),
    }
)
"""What is true of each reason."""

ReasonName = str
"""A name in `REASONS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a failure's reason was concluded from.

    Attributes:
        http_status: Status of the answer over HTTP.
        exit_code: Of the process that ended.
        signal: Name of the signal that ended it.
        error: Symbolic name of the system's error, such as ECONNREFUSED.
        event: Kubernetes' word for what became of a pod, such as Evicted.
    """

    http_status: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    error: str | None = None
    event: str | None = None

    def as_json(self) -> dict[str, Any] | None:
        """The fields that say something; None: there are none."""
        return {name: value for name, value in asdict(self.bounded()).items() if value is not None} or None

    def bounded(self) -> Evidence:
        """The evidence, with texts of bounded length that can be written."""
        return replace(
            self,
            signal=None if self.signal is None else printable(self.signal, MAX_WORD),
            error=None if self.error is None else printable(self.error, MAX_WORD),
            event=None if self.event is None else printable(self.event, MAX_WORD),
        )

    def __bool__(self) -> bool:
        return self != NO_EVIDENCE


NO_EVIDENCE: Final = Evidence()


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something failed, and what shows it."""

    reason: ReasonName
    evidence: Evidence = NO_EVIDENCE

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise ValueError(f"{self.reason!r} is no reason; reasons are {', '.join(REASONS)}")

    @property
    def kind(self) -> FailureKind:
        """Whose doing it is."""
        return REASONS[self.reason].kind


def evidence_of_exit(code: int) -> Evidence:
    """The evidence of a process's end.

    Args:
        code: As `subprocess` gives it: negative is the number of a signal.
    """
    if code >= 0:
        return Evidence(exit_code=code)
    try:
        return Evidence(signal=signal.Signals(-code).name)
    except ValueError:
        return Evidence(signal=str(-code))


def cause_of_exit(code: int | None) -> Cause:
    """The cause of the end of an environment's process that nobody here has ended.

    A process that is killed (SIGKILL, SIGTERM) does not do that by itself: the kernel has, for want of memory, or
    whoever ends machines.

    Args:
        code: As in `evidence_of_exit`; None: unknown.
    """
    if code is None:
        return Cause("EnvironmentCrashed")
    killed = code in (-signal.SIGKILL, -signal.SIGTERM)
    return Cause("ProcessKilled" if killed else "EnvironmentCrashed", evidence_of_exit(code))


def error_name(number: int | None) -> str | None:
    """Symbolic name of a system's error; None: it has none."""
    return None if number is None else errno.errorcode.get(number)
