"""Check of a job's dataset for `kuberoll validate --dataset`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kuberoll_api.model.rolloutjob import RolloutJob

if TYPE_CHECKING:
    from kuberoll_workers.dataset.inputs import InputSummary
    from kuberoll_workers.dataset.rows import DatasetError

_MOST_ERRORS = 10


class _TooMany(Exception):
    """Enough rows are invalid."""


def check_dataset(job: RolloutJob, base: Path) -> tuple[str, list[str]]:
    """Read and check all rows of a job's dataset; nothing of the model is loaded.

    Args:
        base: The manifest's directory.

    Returns:
        A summary in one line, empty if there is none; and the errors, of the first ten invalid rows at most.
    """
    from kuberoll_workers.data.tracebacks import with_frames
    from kuberoll_workers.dataset.certificates import coverage
    from kuberoll_workers.dataset.inputs import scan
    from kuberoll_workers.dataset.rows import DatasetError
    from kuberoll_workers.local.options import import_directories
    from kuberoll_workers.worker.environments import isolated_environment_factory, remote_digests

    errors: list[str] = []

    def refused(error: DatasetError) -> None:
        errors.append(with_frames(error))
        if len(errors) == _MOST_ERRORS:
            raise _TooMany

    path = sys.path[:]
    # A module of an environment may be next to the manifest, or in the working directory.
    sys.path[:0] = import_directories(base)
    try:
        environment = isolated_environment_factory(job, protected=())
        summary = scan(job, base=base, environment=environment, refused=refused)
        certified = coverage(job, base=base, environment=environment, remote=lambda: remote_digests(job))
    except _TooMany:
        return "", [*errors, f"these are the first {_MOST_ERRORS} invalid rows; later ones were not read"]
    except DatasetError as error:
        # If all rows are invalid, that there are none is no news.
        return "", errors or [with_frames(error)]
    finally:
        sys.path[:] = path
    if certified is not None and certified.wrong and job.spec.dataset.certify.mode == "Require":
        errors.append(certified.refusal())
    text = _described(summary) if certified is None else f"{_described(summary)}; certificates: {certified}"
    return ("", errors) if errors else (text, [])


def _described(summary: InputSummary) -> str:
    """`7,473 rows, 7,473 tasks, 59,784 trajectories (math 59,784); sources: gsm8k 7,000, puzzles 473`."""
    by_environment = ", ".join(f"{name} {count:,}" for name, count in summary.trajectories_of.items())
    trajectories = sum(summary.trajectories_of.values())
    text = f"{summary.rows:,} rows, {summary.tasks:,} tasks, {trajectories:,} trajectories ({by_environment})"
    if summary.trajectories is None:
        text += " in each pass, without end"
    if summary.rows_of_sources:
        text += f"; sources: {', '.join(f'{name} {count:,}' for name, count in summary.rows_of_sources.items())}"
    return text
