"""Notes to the user about outages of the endpoint, which each worker reports."""

from __future__ import annotations

from kuberoll_workers.local.reporter import Reporter
from kuberoll_workers.policy.readiness import TroubleReports, answering_text, waiting_text


class OutageNotes:
    """Notes about the outages that several workers see: each once, and from time to time while it lasts."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._waiting: set[int] = set()
        self._left = 0.0
        self._troubles = self._new_troubles()

    def _new_troubles(self) -> TroubleReports:
        return TroubleReports(lambda reason: self._reporter.note(waiting_text(reason, self._left)))

    def add(self, worker: int, reason: str | None, seconds: float) -> None:
        """Take a worker's report.

        Args:
            reason: None: the endpoint answers again.
            seconds: Seconds left until the worker gives up; without a reason, for which it waited.
        """
        if reason is not None:
            self._waiting.add(worker)
            self._left = seconds
            self._troubles.add(reason)
            return
        self._waiting.discard(worker)
        if not self._waiting:
            self._troubles = self._new_troubles()
            self._reporter.note(answering_text(seconds))
