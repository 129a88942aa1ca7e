"""How a batch that did not go well is told of."""

from __future__ import annotations

from typing import Any

from kuberoll_workers.data.record import FailureRecord


class RolloutFailed(RuntimeError):
    """Some samples of a batch were given up, and the caller asked for that to be an error.

    Attributes:
        batch: The whole batch as it would have been returned: finished samples, and failed ones marked.
        metrics: The metrics that would have been returned.
        failures: Why each failed one was given up; `task_index` is its row.
    """

    def __init__(self, message: str, batch: Any, metrics: dict[str, Any], failures: list[FailureRecord]) -> None:
        super().__init__(message)
        self.batch = batch
        self.metrics = metrics
        self.failures = failures

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.batch, self.metrics, self.failures)


def summary_of(failures: list[FailureRecord], samples: int) -> str:
    """How many failed, and why the first did."""
    first = failures[0]
    return (
        f"{len(failures)} of {samples} samples failed; the first, sample {first.task_index}, in turn "
        f"{first.turn_count + (first.stage == 'generation')} ({first.stage}, {first.kind}): {first.cause}"
    )
