"""Incidents of a trajectory: what went wrong on its way without being its end, whose doing it was, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from kuberoll_workers.data.causes import Cause, FailureKind
from kuberoll_workers.data.plain import printable

Sequel = Literal["sent again", "tried again", "restored", "started over", "resumed"]
"""What was done: the request was sent to an engine again; the step was tried again; the episode was restored; the
trajectory started over from its prompt; another run or worker went on with it."""

MAX_INCIDENTS: Final = 64
"""Maximum number of a trajectory's incidents that are told apart."""
MAX_TEXT: Final = 500
"""Maximum length of an incident's text, in characters."""


@dataclass(slots=True, kw_only=True)
class Incident:
    """One incident, or several alike in a row.

    Attributes:
        kind, reason: Whose doing, and why (`data.causes`).
        stage: The part of the loop that failed, as in `FailureRecord`.
        sequel: What was done.
        text: The first one's error.
        turn: Number of the turn that was under way, from 1; 0: none had begun.
        at: Unix time of the first one.
        seconds, tokens: What was thrown away, by all of them: time, and generated tokens.
        count: How many there were.
        evidence: Of the first one, as `Evidence.as_json`.
    """

    kind: FailureKind
    reason: str
    stage: str
    sequel: Sequel
    text: str
    turn: int
    at: float
    seconds: float = 0.0
    tokens: int = 0
    count: int = 1
    evidence: dict[str, Any] | None = None

    def is_like(self, other: Incident) -> bool:
        """True if they differ in nothing but their texts, times and costs."""
        return (self.reason, self.stage, self.sequel, self.turn) == (
            other.reason, other.stage, other.sequel, other.turn,
        )  # fmt: skip


class IncidentLog:
    """The incidents of one trajectory, in order; similar ones in a row are one.

    Attributes:
        all: The incidents so far, to be copied by whoever keeps them.
        is_new: Some have not been journaled, or have grown since.
    """

    __slots__ = ("_journaled", "_noted", "all", "is_new")

    def __init__(self, earlier: Iterable[Incident] = (), *, noted: Callable[[Incident], None] | None = None) -> None:
        """
        Args:
            earlier: Incidents before the trajectory was interrupted.
            noted: Called with each new incident.
        """
        self.all = [*earlier]
        self._journaled = len(self.all)
        self._noted = noted
        self.is_new = False

    def note(
        self,
        cause: Cause,
        text: str,
        *,
        stage: str,
        sequel: Sequel,
        turn: int,
        at: float,
        seconds: float = 0.0,
        tokens: int = 0,
    ) -> None:
        """Note an incident; its arguments are the attributes of `Incident`."""
        new = Incident(
            kind=cause.kind,
            reason=cause.reason,
            stage=stage,
            sequel=sequel,
            text=printable(text, MAX_TEXT),
            turn=turn,
            at=round(at, 3),
            seconds=round(seconds, 3),
            tokens=tokens,
            evidence=cause.evidence.as_json(),
        )
        if self._noted is not None:
            self._noted(new)
        self.is_new = True
        last = self.all[-1] if self.all else None
        if last is not None and (last.is_like(new) or len(self.all) >= MAX_INCIDENTS):
            # A new object: the old one may have been handed out.
            self.all[-1] = replace(
                last,
                seconds=round(last.seconds + new.seconds, 3),
                tokens=last.tokens + new.tokens,
                count=last.count + 1,
            )
            self._journaled = min(self._journaled, len(self.all) - 1)
        else:
            self.all.append(new)

    def to_journal(self) -> list[Incident] | None:
        """Those that have not been journaled, or have grown since; they count as journaled then."""
        new = self.all[self._journaled :]
        self._journaled = len(self.all)
        self.is_new = False
        return new or None

    def forget_journal(self) -> None:
        """Have all of them journaled again: what was journaled does not count any more."""
        self._journaled = 0
        self.is_new = bool(self.all)


def united(journaled: Iterable[Iterable[Incident] | None]) -> list[Incident]:
    """The incidents of journaled turns, in order: of one that has grown the last state."""
    found: list[Incident] = []
    for incidents in journaled:
        for incident in incidents or ():
            if found and found[-1].is_like(incident) and found[-1].at == incident.at:
                found.pop()
            found.append(incident)
    return found


RESENT: Final[ContextVar[Callable[[Cause, str, float], None] | None]] = ContextVar("kuberoll_resent", default=None)
"""Called by `note_resent`; set by whoever plays a trajectory, in its task."""


def note_resent(cause: Cause, text: str, seconds: float) -> None:
    """Note on the trajectory whose task this is that its request failed and is sent again.

    Routing is no part of a trajectory and knows none: without this, what it mends would leave no trace there.

    Args:
        seconds: How long the request had taken.
    """
    if (note := RESENT.get()) is not None:
        note(cause, text, seconds)
