"""Log of failures: each distinct cause once, with its traceback."""

from __future__ import annotations

import logging

from kuberoll_workers.data.failure_causes import FailureCauses
from kuberoll_workers.data.record import FailureRecord
from kuberoll_workers.data.text import visible

_log = logging.getLogger(__name__)


class FailureLog:
    """Logs the first failure of each cause; the others are only counted, and are in `failures.jsonl`."""

    def __init__(self) -> None:
        self.causes = FailureCauses()

    def log(self, failure: FailureRecord) -> None:
        """Log a failure if its cause is new."""
        if not self.causes.add(failure):
            return
        row = "" if failure.row is None else f", dataset row {failure.row}"
        text = (
            f"environment {failure.task_name}: task {failure.task_index}, rollout {failure.rollout_index}{row}, failed "
            f"({failure.kind}, {failure.stage}): {failure.cause}"
        )
        if failure.traceback is not None:
            text = f"{text}\n{failure.traceback.rstrip()}"
        _log.error("%s", visible(text))
