"""The outcome of a run: its exit code, and the reason if that is not 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kuberoll_workers.run_end import RunEnd

EXIT_PROBLEM = 1
EXIT_INTERRUPTED = 130


def outcome(
    end: RunEnd,
    *,
    location: str,
    failures: str,
    max_failed_fraction: float,
    problems: Sequence[str],
    interrupted: bool,
    counted: int,
    stopped: bool = True,
) -> tuple[int, str | None]:
    """The exit code, and why it is not 0.

    Args:
        location: The run's directory or URI.
        failures: Where the causes of failures are.
        max_failed_fraction: The failure budget.
        problems: What ended parts of the run.
        counted: Trajectories that are stored as far as the workers reported; used without aggregates.
        stopped: True if a run without an end of its own was stopped by its consumer.
    """
    endless = end.planned is None
    stored, missing, failed = counted, max(0, (end.planned or 0) - counted), 0
    if end.aggregates is not None:
        stored, missing, failed = end.aggregates.trajectories, end.missing, end.aggregates.failed
    resume = f"continue with --resume --output {location}"
    words = f"{stored}{'' if endless else f' of {end.planned}'} trajectories are stored; {resume}"
    if problems:
        return EXIT_PROBLEM, "\n".join([*problems, words])
    if interrupted and (missing or (endless and not stopped)):
        return EXIT_INTERRUPTED, f"interrupted: {words}"
    if missing:
        # Resuming does not help if the dataset has no more groups.
        return EXIT_PROBLEM, (None if end.wanted is None else end.problem()) or f"only {words}"
    planned = stored + failed if end.planned is None else end.planned
    if failed > max_failed_fraction * planned:
        return EXIT_PROBLEM, (
            f"{failed} of {planned} trajectories failed, more than rollout.maxFailedFraction "
            f"({max_failed_fraction:g}) allows; their causes are in {failures}. To retry them, {resume}; "
            "add --force if you have changed code or data"
        )
    return 0, None
