"""Metrics of the trainer that consumes a run, as its plan tells them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kuberoll_workers.data.consumer_counts import ConsumerCounts
from kuberoll_workers.telemetry import definitions as metrics
from kuberoll_workers.telemetry.tallies import counter, gauge, histogram


class ConsumerMetrics:
    """Metrics of a run's trainer. One worker of a run publishes what the trainer counts, for all of them."""

    def __init__(self, job: str, registry: CollectorRegistry) -> None:
        """Register the metrics."""
        self._job = job
        self._before: ConsumerCounts | None = None
        self._lag = histogram(metrics.POLICY_LAG, registry)
        self._taken = counter(metrics.GROUPS_TAKEN, registry)
        self._ready = gauge(metrics.GROUPS_READY, registry)
        self._stale = counter(metrics.STALE_TRAJECTORIES, registry)
        self._stale_tokens = counter(metrics.STALE_TOKENS, registry)
        self._waiting = counter(metrics.TRAINER_WAITING_SECONDS, registry)
        self._held = counter(metrics.HELD_BACK_SECONDS, registry)
        self._publications = counter(metrics.PUBLICATIONS, registry)
        self._publish_seconds = counter(metrics.PUBLISH_SECONDS, registry)

    def hold(self, seconds: float) -> None:
        """Count seconds for which this worker was held back."""
        self._held.labels(self._job).inc(seconds)

    def update(self, counts: ConsumerCounts, *, since_start: bool) -> None:
        """Publish what has come since the last counts.

        Args:
            since_start: What came before this process began is in these counts, and was published by an earlier one.
        """
        job, before = self._job, self._before
        if before is None:
            before = counts if since_start else ConsumerCounts()
        self._before = counts
        self._ready.labels(job).set(counts.ready_groups)
        for metric, name in (
            (self._taken, "taken_groups"),
            (self._stale, "stale_trajectories"),
            (self._stale_tokens, "stale_tokens"),
            (self._waiting, "waited_seconds"),
            (self._publications, "publications"),
        ):
            # A trainer that was restarted from a checkpoint goes on with what its plan had.
            metric.labels(job).inc(max(0, getattr(counts, name) - getattr(before, name)))
        for stage, seconds in counts.publish_seconds.items():
            self._publish_seconds.labels(job, stage).inc(max(0.0, seconds - before.publish_seconds.get(stage, 0.0)))
        lag = self._lag.labels(job)
        for versions, trajectories in counts.lag.items():
            for _ in range(trajectories - before.lag.get(versions, 0)):
                lag.observe(versions)
