"""What the operator counts about itself and its jobs, for Prometheus."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kuberoll_api import conditions
from kuberoll_operator.model import Key, Object
from kuberoll_operator.plan import condition, is_true, parse_time

PHASES = ("Pending", "Suspended", "Starting", "Running", "Finishing", "Succeeded", "Failed")

_RECONCILE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_MILESTONE_BUCKETS = (5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21600, 86400, 259200, 604800)


class Metrics:
    """The operator's metrics.

    Attributes:
        registry: What `/metrics` shows.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._reconciles = Counter(
            "kuberoll_operator_reconciles", "Reconciles by how they ended.", ["result"], registry=self.registry
        )
        self._durations = Histogram(
            "kuberoll_operator_reconcile_seconds",
            "Seconds of a reconcile.",
            buckets=_RECONCILE_BUCKETS,
            registry=self.registry,
        )
        self._waits = Histogram(
            "kuberoll_operator_queue_wait_seconds",
            "Seconds from the event, or the time that was due, to the beginning of the reconcile.",
            buckets=_RECONCILE_BUCKETS,
            registry=self.registry,
        )
        self._errors = Counter(
            "kuberoll_operator_errors", "Errors by the API server's reason.", ["reason"], registry=self.registry
        )
        self._requests = Counter(
            "kuberoll_operator_api_requests",
            "Requests to the API server, watches not counted; code 0: no answer.",
            ["verb", "kind", "code"],
            registry=self.registry,
        )
        self._milestones = Histogram(
            "kuberoll_operator_milestone_seconds",
            "Seconds from a job's creation to: generation_ready, first_trajectory, complete.",
            ["milestone"],
            buckets=_MILESTONE_BUCKETS,
            registry=self.registry,
        )
        self._scalings = Counter(
            "kuberoll_operator_scalings",
            "Changes of the number of replicas that jobs want, up or down, between their first and their release.",
            ["direction"],
            registry=self.registry,
        )
        for direction in ("up", "down"):
            self._scalings.labels(direction)
        for result in ("success", "retry", "error"):
            self._reconciles.labels(result)

    def watch(
        self,
        *,
        jobs: Callable[[], Iterable[tuple[Key, Object]]],
        depth: Callable[[], int],
        oldest: Callable[[], float],
        leading: Callable[[], bool],
        cached: Callable[[], Mapping[str, int]],
    ) -> None:
        """Shows these as they are when Prometheus asks."""
        self.registry.register(_Now(jobs, depth, oldest, leading, cached))

    def waited(self, seconds: float) -> None:
        """A key was taken from the queue."""
        self._waits.observe(seconds)

    def reconciled(self, result: str, seconds: float) -> None:
        """A reconcile ended: success, retry (what failed may be better soon) or error (nobody expected it)."""
        self._reconciles.labels(result).inc()
        self._durations.observe(seconds)

    def error(self, reason: str) -> None:
        """Something was not done; the reason is Kubernetes' or this package's word, never a text."""
        self._errors.labels(reason).inc()

    def request(self, verb: str, kind: str, code: int) -> None:
        """The API server answered."""
        self._requests.labels(verb, kind, str(code)).inc()

    def status_written(self, raw: Object, old: Mapping[str, Any], new: Mapping[str, Any], now: datetime) -> None:
        """A job's status changed."""
        if (direction := scaling(old, new)) is not None:
            self._scalings.labels(direction).inc()
        created = parse_time(raw["metadata"].get("creationTimestamp"))
        if created is None:
            return
        for milestone in milestones(old, new):
            self._milestones.labels(milestone).observe(max(0.0, (now - created).total_seconds()))


def scaling(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Whether a job was given more or fewer replicas: up, down; None: neither, or all or none of them."""
    before, after = (int((status.get("generation") or {}).get("desiredReplicas") or 0) for status in (old, new))
    if not before or not after or before == after:
        return None
    return "up" if after > before else "down"


def milestones(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Which milestones a job has come to; each once, those of a job that was suspended before them never."""
    before, after = _ended(old), _ended(new)
    never_stopped = not condition(new, conditions.SUSPENDED)
    found = []
    if not before and never_stopped and _turned(old, new, conditions.GENERATION_READY):
        found.append("generation_ready")
    if after and not before and never_stopped:
        found.append("first_trajectory")
    if never_stopped and _turned(old, new, conditions.COMPLETE):
        found.append("complete")
    return found


def _ended(status: Mapping[str, Any]) -> int:
    progress = status.get("progress") or {}
    return int(progress.get("completed", 0)) + int(progress.get("failed", 0))


def _turned(old: Mapping[str, Any], new: Mapping[str, Any], kind: str) -> bool:
    return is_true(new, kind) and not is_true(old, kind)


_UNDER_WAY = frozenset({"Starting", "Running"})


class _Now(Collector):
    """Gauges that are read when they are asked for."""

    def __init__(
        self,
        jobs: Callable[[], Iterable[tuple[Key, Object]]],
        depth: Callable[[], int],
        oldest: Callable[[], float],
        leading: Callable[[], bool],
        cached: Callable[[], Mapping[str, int]],
    ) -> None:
        self._jobs, self._depth, self._oldest = jobs, depth, oldest
        self._leading, self._cached = leading, cached

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        phases = Tally(str((item.get("status") or {}).get("phase") or "Pending") for _, item in self._jobs())
        jobs = GaugeMetricFamily("kuberoll_operator_jobs", "RolloutJobs by phase.", labels=["phase"])
        for phase in PHASES:
            jobs.add_metric([phase], phases[phase])
        yield jobs
        yield self._replicas()
        cached = GaugeMetricFamily("kuberoll_operator_cached_objects", "Objects in the cache.", labels=["kind"])
        for kind, count in sorted(self._cached().items()):
            cached.add_metric([kind], count)
        yield cached
        yield GaugeMetricFamily("kuberoll_operator_queue_depth", "Jobs that wait for a reconcile.", self._depth())
        yield GaugeMetricFamily(
            "kuberoll_operator_queue_oldest_seconds",
            "Age of the job that has waited or been reconciled for longest.",
            self._oldest(),
        )
        yield GaugeMetricFamily("kuberoll_operator_leader", "1 while this operator leads.", int(self._leading()))

    def _replicas(self) -> Metric:
        found = GaugeMetricFamily(
            "kuberoll_operator_generation_replicas",
            "Replicas of the policy, ready and desired, of jobs that start or run.",
            labels=["namespace", "job", "state"],
        )
        for key, item in self._jobs():
            status = item.get("status") or {}
            generation = status.get("generation") or {}
            if status.get("phase") not in _UNDER_WAY or generation.get("backend") == "External":
                continue
            for state in ("ready", "desired"):
                found.add_metric([key.namespace, key.name, state], int(generation.get(f"{state}Replicas") or 0))
        return found
