"""The error for a batch with failed samples."""

from __future__ import annotations

from typing import Any, Literal

from kuberoll_workers.data.failure_causes import FailureCauses
from kuberoll_workers.data.record import FailureRecord
from kuberoll_workers.data.tracebacks import location

OnFailure = Literal["mark", "raise"]
"""Handling of samples that failed permanently."""


class RolloutFailed(RuntimeError):
    """Some samples of a batch failed permanently, and `on_failure` is "raise".

    Attributes:
        batch: The whole batch as `on_failure="mark"` would have returned it.
        metrics: The metrics that would have been returned.
        failures: The failed samples; `task_index` is the row.
    """

    def __init__(self, message: str, batch: Any, metrics: dict[str, Any], failures: list[FailureRecord]) -> None:
        super().__init__(message)
        self.batch = batch
        self.metrics = metrics
        self.failures = failures

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.batch, self.metrics, self.failures)


def distinct_tracebacks(failures: list[FailureRecord]) -> list[str]:
    """The traceback of each distinct cause, with the number of its failures and the first sample."""
    return [
        f"{cause.count} of them, the first in sample {cause.first.task_index}:\n{cause.first.traceback.rstrip()}"
        for cause in FailureCauses.of(failures).by_count()
        if cause.first.traceback is not None
    ]


def summary_of(failures: list[FailureRecord], samples: int) -> str:
    """The number of failures, and the cause of the first, with the line of the environment's code."""
    first = failures[0]
    return (
        f"{len(failures)} of {samples} samples failed; the first, sample {first.task_index}, in turn "
        f"{first.turn_count + (first.stage == 'generation')} ({first.stage}, {first.kind}): {first.cause}"
        f"{f' ({place})' if (place := location(first.frames or ())) else ''}"
    )
