"""prometheus_client's objects for the definitions, and tallies that count at a fraction of their cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Final, Literal

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry

from kuberoll_api.metrics import Counter, Gauge, Histogram

_MODES: Final[dict[str, Literal["livesum", "livemax"]]] = {"sum": "livesum", "max": "livemax"}


def counter(metric: Counter, registry: CollectorRegistry) -> prometheus.Counter:
    """Create and register a counter."""
    return prometheus.Counter(metric.name, metric.help, metric.labels, registry=registry)


def gauge(metric: Gauge, registry: CollectorRegistry) -> prometheus.Gauge:
    """Create and register a gauge."""
    mode = _MODES[metric.over_processes]
    return prometheus.Gauge(metric.name, metric.help, metric.labels, registry=registry, multiprocess_mode=mode)


def histogram(metric: Histogram, registry: CollectorRegistry) -> prometheus.Histogram:
    """Create and register a histogram."""
    return prometheus.Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)


class HistogramTally:
    """Observations of one histogram, collected and then added together.

    `Histogram.observe` scans the buckets and locks two values, which takes 2 µs, or 5 with several processes; a turn of
    the loop takes 50 and has three of them. Appending to a list takes 0.03 µs.

    Attributes:
        observe: Adds one observation.
    """

    __slots__ = ("_bounds", "_histogram", "_pending", "observe")

    def __init__(self, metric: Histogram, child: prometheus.Histogram) -> None:
        """Count for one labelled child of the metric's histogram."""
        self._histogram = child
        self._bounds = metric.buckets
        self._pending: list[float] = []
        self.observe: Callable[[float], None] = self._pending.append

    def flush(self) -> int:
        """Add the collected observations to the histogram; return their number."""
        pending = self._pending
        if not pending:
            return 0
        total, count = sum(pending), len(pending)
        pending.sort()
        below, buckets = 0, self._histogram._buckets
        # The library has no way to observe several at once; a test holds this to what its `observe` does.
        for bound, bucket in zip(self._bounds, buckets, strict=False):
            upto = bisect_right(pending, bound, below)
            if upto > below:
                bucket.inc(upto - below)
                below = upto
            if below == count:
                break
        else:
            buckets[-1].inc(count - below)
        self._histogram._sum.inc(total)
        pending.clear()
        return count
