"""Definitions of all metrics of the broker."""

from __future__ import annotations

from typing import Final

from kuberoll_api.metrics import Counter, Gauge, MetricGroup, metrics_by_name

SANDBOXES: Final = Gauge(
    name="kuberoll_broker_sandboxes",
    unit="sandboxes",
    labels=("state",),
    help="Sandboxes by state: Waiting, Running, Ended (and not removed yet) or Refused.",
)
STARTS: Final = Counter(
    name="kuberoll_broker_starts_total",
    unit="tries",
    labels=("result",),
    help="Tries to make a sandbox's pod: made, quota (a ResourceQuota is full), throttled (429), refused or failed.",
)
REMOVALS: Final = Counter(
    name="kuberoll_broker_removals_total",
    unit="sandboxes",
    labels=("reason",),
    help="Pods of sandboxes that were removed: released by their worker, ended, without a worker, or of a silent one.",
)
API_REQUESTS: Final = Counter(
    name="kuberoll_broker_api_requests_total",
    unit="requests",
    labels=("verb", "kind", "code"),
    help="Requests to the API server, without watches; code 0 means no answer.",
)

GROUPS: Final = (MetricGroup("Pods of sandboxes", (SANDBOXES, STARTS, REMOVALS, API_REQUESTS)),)

METRICS: Final = metrics_by_name(GROUPS)
