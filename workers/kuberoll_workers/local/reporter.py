"""What a run tells the person who watches it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kuberoll_workers.analysis.aggregation.aggregates import EnvironmentSummary
from kuberoll_workers.rollouts.drop_report import DropReport
from kuberoll_workers.worker import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of a run over all its workers.

    Attributes:
        planned: Trajectories of the job; those of an earlier run included, as they are in `progress.resumed`.
        seconds: Since the first worker was started.
    """

    planned: int
    progress: Progress
    seconds: float

    @property
    def completed(self) -> int:
        """Trajectories that need no more work."""
        return self.progress.resumed + self._ended_in_run

    @property
    def remaining_seconds(self) -> float | None:
        """Expected seconds to the end, at the pace so far; None before the first trajectory."""
        return self.seconds / self._ended_in_run * max(0, self.planned - self.completed) if self._ended_in_run else None

    @property
    def _ended_in_run(self) -> int:
        # Oversampled ones are beyond what is planned.
        return self.progress.trajectories + self.progress.failed + self.progress.filtered


@dataclass(slots=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        exit_code: 0: every trajectory finished, or failed within the failure budget. 1: not so. 130: interrupted.
        seconds: Wall seconds of the run's parts, in their order.
        problem: Why it is not 0, in a sentence.
    """

    exit_code: int = 0
    problem: str | None = None
    summaries: Mapping[str, EnvironmentSummary] = field(default_factory=dict)
    totals: RunProgress | None = None
    tail: DropReport = field(default_factory=DropReport)
    seconds: dict[str, float] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


class Reporter(Protocol):
    """Shows a run as it goes: a progress bar, or lines of a log."""

    def note(self, text: str) -> None:
        """A sentence."""
        ...

    def phase(self, name: str, seconds: float) -> None:
        """A part of the start is done."""
        ...

    def progress(self, totals: RunProgress) -> None:
        """The newest counts."""
        ...

    def finish(self, result: RunResult) -> None:
        """The end."""
        ...

    def close(self) -> None:
        """Give the terminal back; also where there was no end to show."""
        ...
