"""Metrics of the broker, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kuberoll_operator.broker import metric_definitions as definitions
from kuberoll_operator.broker.broker import Broker


class BrokerMetrics:
    """The broker's metrics, as defined in `metric_definitions`.

    Attributes:
        registry: Registry that `/metrics` shows.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        metric = definitions.API_REQUESTS
        self._requests = prometheus.Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def record_request(self, verb: str, kind: str, code: int) -> None:
        """Record an answer of the API server."""
        self._requests.labels(verb, kind, str(code)).inc()

    def watch(self, broker: Broker) -> None:
        """Show a broker's sandboxes."""
        self.registry.register(_Sandboxes(broker))


class _Sandboxes(Collector):
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Metric]:
        metric = definitions.SANDBOXES
        gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        states = self._broker.states()
        for state in ("Waiting", "Running", "Ended", "Refused"):
            gauge.add_metric([state], states[state])
        yield gauge
        for counter, counts in (
            (definitions.STARTS, self._broker.made),
            (definitions.REMOVALS, self._broker.removed),
        ):
            family = CounterMetricFamily(counter.name, counter.help, labels=counter.labels)
            for reason, count in sorted(counts.items()):
                family.add_metric([reason], count)
            yield family
