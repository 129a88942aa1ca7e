"""What a metric is, as data: the workers and the operator make theirs of it, and scripts/metrics.py the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

Label: TypeAlias = Literal[
    "cause",
    "code",
    "direction",
    "environment",
    "kind",
    "milestone",
    "namespace",
    "outcome",
    "phase",
    "reason",
    "result",
    "rolloutjob",
    "sign",
    "stage",
    "state",
    "stop_reason",
    "turn",
    "verb",
]
"""Every label that a metric may have; each has few values, never a trajectory's or a request's own."""

LABELS: Final[Mapping[Label, str]] = {
    "cause": "a cause, one of a fixed list",
    "code": "an HTTP status; 0: no answer",
    "direction": "up or down",
    "environment": "a name of `spec.environments`",
    "kind": "one of a fixed list, or a kind of Kubernetes object",
    "milestone": "one of a fixed list",
    "namespace": "the RolloutJob's namespace",
    "outcome": "the outcome of a request, one of a fixed list",
    "phase": "a phase of RolloutJobs",
    "reason": "one of a fixed list, or the API server's reason",
    "result": "a result, one of a fixed list",
    "rolloutjob": "the RolloutJob's name: one for each process of a worker",
    "sign": "positive or negative",
    "stage": "the stage of a trajectory, one of a fixed list",
    "state": "one of a fixed list",
    "stop_reason": "how a trajectory ended, as in its record",
    "turn": "1, 2, 3-4, 5-8, 9-16, 17-32, 33+",
    "verb": "an HTTP method",
}
"""What bounds the values of each label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What all types of metrics have.

    Attributes:
        name: As Prometheus shows it.
        unit: What its values count or measure, in the plural.
    """

    name: str
    help: str
    unit: str
    labels: tuple[Label, ...] = ()

    def __post_init__(self) -> None:
        if unknown := set(self.labels) - set(get_args(Label)):
            raise ValueError(f"{self.name}: {', '.join(sorted(unknown))}: not among the labels that metrics may have")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """Only grows while its process lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """Is what it is now.

    Attributes:
        over_processes: What several processes of one worker show together.
    """

    over_processes: Literal["sum", "max"] = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """Counts observations by size.

    Attributes:
        buckets: Their upper bounds, rising; one without a bound is added.
    """

    buckets: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics that belong together, under a heading of the reference."""

    title: str
    metrics: tuple[Metric, ...]


def every(groups: Iterable[Group]) -> dict[str, Metric]:
    """The metrics of some groups by name.

    Raises:
        ValueError: Two have one name.
    """
    found: dict[str, Metric] = {}
    for group in groups:
        for metric in group.metrics:
            if metric.name in found:
                raise ValueError(f"{metric.name}: there are two metrics of this name")
            found[metric.name] = metric
    return found
