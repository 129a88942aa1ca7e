"""Prometheus metrics of the workers.

`definitions` lists them. With `PROMETHEUS_MULTIPROC_DIR` set before this package is imported, several worker
processes share one endpoint (prometheus_client's multiprocess mode), which is how `kuberoll run` serves them.
"""

from kuberoll_workers.telemetry.meters import Meters
from kuberoll_workers.telemetry.rollouts import (
    FLUSH_SECONDS,
    Activity,
    EnvironmentMetrics,
    JournalMetrics,
    RolloutMetrics,
    TrajectoryCounts,
    turn_bucket,
)
from kuberoll_workers.telemetry.routing import RequestOutcome, RoutingMetrics, RoutingState, Unanswering

__all__ = [
    "FLUSH_SECONDS",
    "Activity",
    "EnvironmentMetrics",
    "JournalMetrics",
    "Meters",
    "RequestOutcome",
    "RolloutMetrics",
    "RoutingMetrics",
    "RoutingState",
    "TrajectoryCounts",
    "Unanswering",
    "turn_bucket",
]
