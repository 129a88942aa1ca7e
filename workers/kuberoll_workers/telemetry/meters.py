"""What environments count themselves, and the worker publishes with their name."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import prometheus_client as prometheus

from kuberoll_api.metrics import Counter, Gauge, Histogram, Metric

Series: TypeAlias = tuple[str, tuple[str, ...]]
"""The name of a metric, and the values of its labels behind those of the job and of the environment."""

Collector: TypeAlias = prometheus.Counter | prometheus.Gauge | prometheus.Histogram

_MOST_OBSERVATIONS: Final = 1 << 16


class Meters:
    """Counts that one thread makes and another one reads.

    An environment in the worker's process (isolation `Inline`) that has them as its attribute `meters` has them
    published. All series are there from the beginning, at 0: Prometheus does not see the increase of one that first
    appears above 0.
    """

    def __init__(self, series: Iterable[tuple[Metric, tuple[str, ...]]]) -> None:
        """
        Args:
            series: Metrics of `definitions.METERED`, with the labels that follow `rolloutjob` and `environment`.
        """
        given = list(series)
        # Never with other keys than these: who reads is not disturbed by who counts.
        self._values: dict[Series, float] = {
            (metric.name, labels): 0 for metric, labels in given if not isinstance(metric, Histogram)
        }
        self._observed: dict[Series, deque[float]] = {
            # Of what nobody reads, the newest.
            (metric.name, labels): deque(maxlen=_MOST_OBSERVATIONS)
            for metric, labels in given
            if isinstance(metric, Histogram)
        }

    def add(self, metric: Counter | Gauge, *labels: str, by: float = 1) -> None:
        """Count; a gauge also downwards. Always by the same thread."""
        self._values[metric.name, labels] += by

    def observe(self, metric: Histogram, amount: float, *labels: str) -> None:
        """Add an observation."""
        self._observed[metric.name, labels].append(amount)

    def value(self, metric: Counter | Gauge, *labels: str) -> float:
        """What has been counted so far."""
        return self._values[metric.name, labels]

    def values(self) -> dict[Series, float]:
        """What has been counted so far, by series; without observations."""
        return dict(self._values)

    def take(self) -> dict[Series, list[float]]:
        """Take the observations since the last time, by series."""
        return {series: [new.popleft() for _ in range(len(new))] for series, new in self._observed.items()}


class MeterPublisher:
    """Publishes the meters of one environment, of which a worker may make several instances, one after the other."""

    def __init__(self, collectors: Mapping[str, Collector], labels: tuple[str, str]) -> None:
        """
        Args:
            collectors: Those of `definitions.METERED`, by the metrics' names.
            labels: Values of `rolloutjob` and `environment`.
        """
        self._collectors = collectors
        self._labels = labels
        self._meters: list[Meters] = []
        self._published: dict[Series, float] = {}

    def watch(self, meters: Meters) -> None:
        """Publish these too; may be called in any thread."""
        self._meters.append(meters)

    def totals(self) -> dict[Series, float]:
        """What all instances have counted, by series."""
        found: dict[Series, float] = {}
        for meters in list(self._meters):
            for series, value in meters.values().items():
                found[series] = found.get(series, 0) + value
        return found

    def flush(self) -> None:
        """Publish what has been counted since the last time."""
        for meters in list(self._meters):
            for series, amounts in meters.take().items():
                histogram = self._collector(series)
                assert isinstance(histogram, prometheus.Histogram)
                for amount in amounts:
                    histogram.observe(amount)
        for series, value in self.totals().items():
            match self._collector(series):
                case prometheus.Gauge() as gauge:
                    gauge.set(value)
                case prometheus.Counter() as counter:
                    counter.inc(value - self._published.get(series, 0))
                    self._published[series] = value

    def _collector(self, series: Series) -> Collector:
        name, labels = series
        return self._collectors[name].labels(*self._labels, *labels)


def series_name(series: Series) -> str:
    """A name of a series for other processes: `kuberoll_sandbox_starts_total{failed}`."""
    name, labels = series
    return f"{name}{{{','.join(labels)}}}" if labels else name
