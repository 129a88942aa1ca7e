"""Metrics of the operator and its jobs, for Prometheus."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kuberoll_api import conditions
from kuberoll_api.metrics import Counter, Gauge, Histogram
from kuberoll_operator import metric_definitions as definitions
from kuberoll_operator.backends import runs_in_job
from kuberoll_operator.deadlines import parse_time
from kuberoll_operator.main_condition import waits_for_problem
from kuberoll_operator.model import Key, Object, condition, is_true
from kuberoll_operator.placement import gpus_of

PHASES = ("Pending", "Queued", "Suspended", "Starting", "Running", "Finishing", "Succeeded", "Failed")


class Metrics:
    """The operator's metrics, as defined in `metric_definitions`.

    Attributes:
        registry: Registry that `/metrics` shows.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._reconciles = self._counter(definitions.RECONCILES)
        self._durations = self._histogram(definitions.RECONCILE_SECONDS)
        self._waits = self._histogram(definitions.QUEUE_WAIT_SECONDS)
        self._errors = self._counter(definitions.ERRORS)
        self._requests = self._counter(definitions.API_REQUESTS)
        self._milestones = self._histogram(definitions.MILESTONE_SECONDS)
        self._scalings = self._counter(definitions.SCALINGS)
        for direction in ("up", "down"):
            self._scalings.labels(direction)
        for result in ("success", "retry", "error"):
            self._reconciles.labels(result)

    def _counter(self, metric: Counter) -> prometheus.Counter:
        return prometheus.Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: Histogram) -> prometheus.Histogram:
        return prometheus.Histogram(
            metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets
        )

    def watch(
        self,
        *,
        jobs: Callable[[], Iterable[tuple[Key, Object]]],
        depth: Callable[[], int],
        oldest: Callable[[], float],
        leading: Callable[[], bool],
        cached: Callable[[], Mapping[str, int]],
    ) -> None:
        """Add gauges whose values are read at every scrape."""
        self.registry.register(_LiveGauges(jobs, depth, oldest, leading, cached))

    def record_wait(self, seconds: float) -> None:
        """Record how long a key waited in the queue."""
        self._waits.observe(seconds)

    def record_reconcile(self, result: str, seconds: float) -> None:
        """Record a reconcile and its result: success, retry (may be transient) or error (an unexpected exception)."""
        self._reconciles.labels(result).inc()
        self._durations.observe(seconds)

    def record_error(self, reason: str) -> None:
        """Count an error; the reason is a word of Kubernetes or of this package, never free text."""
        self._errors.labels(reason).inc()

    def record_request(self, verb: str, kind: str, code: int) -> None:
        """Count a request to the API server; code 0: no answer."""
        self._requests.labels(verb, kind, str(code)).inc()

    def record_status(self, raw: Object, old: Mapping[str, Any], new: Mapping[str, Any], now: datetime) -> None:
        """Record the scalings and milestones that a change of a job's status shows."""
        if (direction := scaling(old, new)) is not None:
            self._scalings.labels(direction).inc()
        created = parse_time(raw["metadata"].get("creationTimestamp"))
        if created is None:
            return
        for milestone in milestones(old, new):
            self._milestones.labels(milestone).observe(max(0.0, (now - created).total_seconds()))


def scaling(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """ "up" or "down" if a job's desired replicas changed; None if not, or from or to zero."""
    before, after = (int((status.get("generation") or {}).get("desiredReplicas") or 0) for status in (old, new))
    if not before or not after or before == after:
        return None
    return "up" if after > before else "down"


def milestones(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Milestones that a change of status reaches, each once; none for a job that was suspended before."""
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


class _LiveGauges(Collector):
    """Gauges that are read at every scrape."""

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

    def describe(self) -> Iterable[prometheus.Metric]:
        return ()

    def collect(self) -> Iterable[prometheus.Metric]:
        leading = self._leading()
        if leading:
            # A standby sees the same jobs; a sum over operators would count them twice.
            yield from self._of_jobs()
        yield _family(definitions.CACHED_OBJECTS, {(kind,): count for kind, count in sorted(self._cached().items())})
        yield _family(definitions.QUEUE_DEPTH, {(): self._depth()})
        yield _family(definitions.QUEUE_OLDEST_SECONDS, {(): self._oldest()})
        yield _family(definitions.LEADER, {(): int(leading)})

    def _of_jobs(self) -> Iterable[prometheus.Metric]:
        phases = Tally(str((item.get("status") or {}).get("phase") or "Pending") for _, item in self._jobs())
        yield _family(definitions.JOBS, {(phase,): phases[phase] for phase in PHASES})
        waiting: dict[tuple[str, ...], float] = {
            (key.namespace, key.name, *problem): 1.0
            for key, item in self._jobs()
            if (problem := waits_for_problem(item.get("status") or {})) is not None
        }
        yield _family(definitions.WAITING_JOBS, waiting)
        replicas = {labels: (count, gpus) for labels, count, gpus in self._replicas()}
        yield _family(definitions.GENERATION_REPLICAS, {labels: count for labels, (count, _) in replicas.items()})
        yield _family(definitions.GENERATION_GPUS, {labels: count * gpus for labels, (count, gpus) in replicas.items()})

    def _replicas(self) -> Iterator[tuple[tuple[str, ...], int, float]]:
        """Labels, replicas, and GPUs of each replica."""
        for key, item in self._jobs():
            status = item.get("status") or {}
            generation = status.get("generation") or {}
            if status.get("phase") not in _UNDER_WAY or not runs_in_job(generation.get("backend")):
                continue
            for state in ("ready", "desired"):
                count = int(generation.get(f"{state}Replicas") or 0)
                yield (key.namespace, key.name, state), count, gpus_of((item.get("spec") or {}).get("generation") or {})


def _family(metric: Gauge, values: Mapping[tuple[str, ...], float]) -> prometheus.Metric:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
