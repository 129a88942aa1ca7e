"""Metric definitions as data, for the workers, the operator, and the reference that scripts/metrics.py writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

Label: TypeAlias = Literal[
    "cause",
    "code",
    "condition",
    "continuity",
    "direction",
    "environment",
    "kind",
    "milestone",
    "namespace",
    "outcome",
    "phase",
    "reason",
    "recovery",
    "result",
    "rolloutjob",
    "sign",
    "stage",
    "state",
    "stop_reason",
    "turn",
    "verb",
]
"""Labels that metrics may have. Each has few values; none identifies a trajectory or a request."""

LABELS: Final[Mapping[Label, str]] = {
    "cause": "a cause, one of a fixed list",
    "code": "an HTTP status; 0: no answer",
    "condition": "a type of condition of a RolloutJob",
    "continuity": "new, clean, realigned or forked: how a call continued others",
    "direction": "up or down",
    "environment": "a name of `spec.environments`",
    "kind": "one of a fixed list, or a kind of Kubernetes object",
    "milestone": "one of a fixed list",
    "namespace": "the RolloutJob's namespace",
    "outcome": "the outcome of a request, one of a fixed list",
    "phase": "a phase of RolloutJobs",
    "reason": "one of a fixed list, or the API server's reason",
    "recovery": "how an episode goes on when its instance is gone",
    "result": "a result, one of a fixed list",
    "rolloutjob": "the RolloutJob's name: one for each process of a worker",
    "sign": "positive or negative",
    "stage": "the stage of a trajectory, or of publishing weights; one of a fixed list",
    "state": "one of a fixed list",
    "stop_reason": "how a trajectory ended, as in its record",
    "turn": "1, 2, 3-4, 5-8, 9-16, 17-32, 33+",
    "verb": "an HTTP method",
}
"""Description of the values of each label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Common part of all types of metrics.

    Attributes:
        name: Name in Prometheus.
        unit: Unit of its values, in the plural.
    """

    name: str
    help: str
    unit: str
    labels: tuple[Label, ...] = ()

    def __post_init__(self) -> None:
        if unknown := set(self.labels) - set(get_args(Label)):
            raise ValueError(f"{self.name}: {', '.join(sorted(unknown))}: not a known label")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """Metric that only grows while its process lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """Metric with a current value.

    Attributes:
        over_processes: Aggregation over several processes of one worker.
    """

    over_processes: Literal["sum", "max"] = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """Metric that counts observations by size.

    Attributes:
        buckets: Upper bounds, ascending; a last bucket without a bound is added.
    """

    buckets: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Group of metrics, under one heading of the reference."""

    title: str
    metrics: tuple[Metric, ...]


def metrics_by_name(groups: Iterable[MetricGroup]) -> dict[str, Metric]:
    """All metrics of some groups, by name.

    Raises:
        ValueError: Two metrics have the same name.
    """
    found: dict[str, Metric] = {}
    for group in groups:
        for metric in group.metrics:
            if metric.name in found:
                raise ValueError(f"{metric.name}: two metrics have this name")
            found[metric.name] = metric
    return found
