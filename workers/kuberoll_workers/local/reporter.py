"""Reports of a run to its user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kuberoll_workers.data.failure_causes import FailureCause
from kuberoll_workers.rollouts.drop_report import DropReport
from kuberoll_workers.worker.config import Progress

if TYPE_CHECKING:
    from kuberoll_workers.analysis.aggregation.aggregates import EnvironmentSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of a run over all its workers.

    Attributes:
        planned: Trajectories of the job, including those of an earlier run, which `progress.resumed` counts; None if it
            has no end of its own.
        seconds: Since the first worker was started.
        tokens_in_flight: Tokens that the engine has generated for turns that have not ended.
    """

    planned: int | None
    progress: Progress
    seconds: float
    tokens_in_flight: int = 0

    @property
    def completed(self) -> int:
        """Number of trajectories that have ended."""
        return self.progress.resumed + self._ended_in_run

    @property
    def remaining_seconds(self) -> float | None:
        """Estimated seconds to the end at the present rate; None before the first trajectory, or without an end."""
        if self.planned is None or not self._ended_in_run:
            return None
        return self.seconds / self._ended_in_run * max(0, self.planned - self.completed)

    @property
    def _ended_in_run(self) -> int:
        # Oversampled trajectories are not planned ones.
        return self.progress.trajectories + self.progress.failed + self.progress.filtered


@dataclass(slots=True, kw_only=True)
class RunResult:
    """Result of a run.

    Attributes:
        exit_code: 0: every trajectory finished, or failed within the failure budget. 1: too many failed or are missing.
            3: the aggregates, the report or the list of files could not be made. 130: interrupted.
        problem: Why the exit code is not 0; None if it is 0.
        location: The run's directory or URI.
        causes: Distinct causes of failures, the most frequent first.
        unscored: Failed trajectories that only lack a score.
        tail: Comparison of kept and dropped trajectories.
        summary: Lines of what was made of the run.
        seconds: Wall seconds of the run's phases, in their order.
        files: Files and directories of the run.
    """

    exit_code: int = 0
    problem: str | None = None
    summaries: Mapping[str, EnvironmentSummary] = field(default_factory=dict)
    location: str = ""
    causes: Sequence[FailureCause] = ()
    unscored: int = 0
    totals: RunProgress | None = None
    tail: DropReport = field(default_factory=DropReport)
    summary: Sequence[str] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


class Reporter(Protocol):
    """Shows the progress of a run, as a progress bar or log lines."""

    def note(self, text: str) -> None:
        """Show a sentence."""
        ...

    def link(self, name: str, url: str) -> None:
        """Show a URL, possibly a long one."""
        ...

    def starting(self, name: str, seconds: float) -> None:
        """Show the phase of the start in progress, and for how long it has been."""
        ...

    def phase(self, name: str, seconds: float) -> None:
        """Show that a phase of the start or of the end is done."""
        ...

    def progress(self, totals: RunProgress) -> None:
        """Show the newest counts."""
        ...

    def finish(self, result: RunResult) -> None:
        """Show the result."""
        ...

    def close(self) -> None:
        """Restore the terminal; also called if there is no result."""
        ...
