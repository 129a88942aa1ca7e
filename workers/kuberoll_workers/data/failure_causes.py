"""Distinct causes of failures: failures of the same line of code are one, whatever values their messages have."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from kuberoll_workers.data.record import FailureRecord
from kuberoll_workers.data.text import one_line
from kuberoll_workers.data.tracebacks import location

MAX_CAUSES = 1000
"""Maximum number of causes that are told apart."""


def cause_key(failure: FailureRecord) -> Hashable:
    """Identity of a failure's cause: the exception's class and the lines that led to it, or its text without those."""
    place = tuple((frame.file, frame.line) for frame in failure.frames or ())
    text = failure.cause.partition(":")[0] if place else failure.cause
    return failure.task_name, failure.kind, failure.reason, failure.stage, text, place


@dataclass(slots=True)
class FailureCause:
    """Failures of one cause.

    Attributes:
        first: The first of them, without its messages and turns.
        same_text: True if all have the same text.
    """

    first: FailureRecord
    count: int = 0
    same_text: bool = True

    @property
    def location(self) -> str:
        """Where the person's code failed, `file:line in function`; empty if unknown."""
        return location(self.first.frames or ())

    def headline(self, limit: int) -> str:
        """The first failure's cause, kind, location and dataset row on one line of at most `limit` characters."""
        row = self.first.row
        place = [self.first.kind, self.location, "" if row is None else f"row {one_line(row, limit // 4)}"]
        where = "; ".join(one_line(part, limit // 4) for part in place if part)
        return f"{one_line(self.first.cause, limit - len(where) - 3)} ({where})"


@dataclass(slots=True)
class FailureCauses:
    """Failures, counted by their cause.

    Attributes:
        others: Failures of causes beyond the first `MAX_CAUSES`.
    """

    others: int = 0
    _causes: dict[Hashable, FailureCause] = field(default_factory=dict)

    @classmethod
    def of(cls, failures: Iterable[FailureRecord]) -> FailureCauses:
        causes = cls()
        for failure in failures:
            causes.add(failure)
        return causes

    def add(self, failure: FailureRecord) -> bool:
        """Count a failure; True if its cause is new."""
        key = cause_key(failure)
        known = self._causes.get(key)
        if known is None:
            if len(self._causes) >= MAX_CAUSES:
                self.others += 1
                return False
            self._causes[key] = FailureCause(replace(failure, messages=[], turns=None), 1)
            return True
        known.count += 1
        known.same_text = known.same_text and known.first.cause == failure.cause
        return False

    @property
    def earliest(self) -> FailureCause | None:
        """Cause of the first failure; None without failures."""
        return next(iter(self._causes.values()), None)

    def by_count(self) -> list[FailureCause]:
        """All causes, the most frequent first."""
        return sorted(self._causes.values(), key=lambda cause: -cause.count)
