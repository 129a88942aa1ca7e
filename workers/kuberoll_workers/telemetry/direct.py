"""Metrics of a worker's side of the direct path."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kuberoll_workers.telemetry import definitions as metrics
from kuberoll_workers.telemetry.tallies import counter, gauge


class DirectMetrics:
    """What consumers ask of a worker, and get."""

    def __init__(self, job: str, registry: CollectorRegistry) -> None:
        """Register the metrics."""
        self._parts = counter(metrics.DIRECT_PARTS, registry).labels(job)
        self._bytes = counter(metrics.DIRECT_BYTES, registry).labels(job)
        self._gaps = counter(metrics.DIRECT_GAPS, registry).labels(job)
        self._waiting = gauge(metrics.DIRECT_WAITING_REQUESTS, registry).labels(job)

    def wait(self, requests: int) -> None:
        """Say how many requests are held now."""
        self._waiting.set(requests)

    def hand_over(self, parts: int, size: int, *, gap: bool) -> None:
        """Count an answer that was sent.

        Args:
            size: Bytes of its parts.
            gap: It lacks parts that its consumer has not had.
        """
        self._parts.inc(parts)
        self._bytes.inc(size)
        self._gaps.inc(gap)
