"""Definitions of all metrics of the operator."""

from __future__ import annotations

from typing import Final

from kuberoll_api.metrics import Counter, Gauge, Histogram, MetricGroup, metrics_by_name

_RECONCILE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_MILESTONE_SECONDS = (5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21600, 86400, 259200, 604800)

JOBS: Final = Gauge(
    name="kuberoll_operator_jobs",
    unit="jobs",
    labels=("phase",),
    help="RolloutJobs by phase; reported by the leader only.",
)
GENERATION_REPLICAS: Final = Gauge(
    name="kuberoll_operator_generation_replicas",
    unit="replicas",
    labels=("namespace", "rolloutjob", "state"),
    help="Ready and desired replicas of the policy, for starting and running jobs.",
)
GENERATION_GPUS: Final = Gauge(
    name="kuberoll_operator_generation_gpus",
    unit="gpus",
    labels=("namespace", "rolloutjob", "state"),
    help="GPUs of those replicas.",
)
WAITING_JOBS: Final = Gauge(
    name="kuberoll_operator_waiting_jobs",
    unit="jobs",
    labels=("namespace", "rolloutjob", "condition", "reason"),
    help="1 for each job that waits for a problem, by the condition and the reason that `kubectl get` shows; gone when "
    "that is over.",
)
SCALINGS: Final = Counter(
    name="kuberoll_operator_scalings_total",
    unit="scalings",
    labels=("direction",),
    help="Changes of a job's desired replicas, up or down; the initial number and the final release are not counted.",
)
MILESTONE_SECONDS: Final = Histogram(
    name="kuberoll_operator_milestone_seconds",
    unit="seconds",
    labels=("milestone",),
    help="Seconds from a job's creation to: generation_ready, first_trajectory, complete.",
    buckets=_MILESTONE_SECONDS,
)

RECONCILES: Final = Counter(
    name="kuberoll_operator_reconciles_total",
    unit="reconciles",
    labels=("result",),
    help="Reconciles by result: success, retry (a failure that may be transient) or error (an unexpected exception).",
)
RECONCILE_SECONDS: Final = Histogram(
    name="kuberoll_operator_reconcile_seconds",
    unit="seconds",
    help="Duration of a reconcile.",
    buckets=_RECONCILE_SECONDS,
)
ERRORS: Final = Counter(
    name="kuberoll_operator_errors_total",
    unit="errors",
    labels=("reason",),
    help="Errors by reason, as the API server gives it.",
)
QUEUE_DEPTH: Final = Gauge(
    name="kuberoll_operator_queue_depth",
    unit="jobs",
    help="Jobs waiting for a reconcile; 0 while another operator leads.",
)
QUEUE_WAIT_SECONDS: Final = Histogram(
    name="kuberoll_operator_queue_wait_seconds",
    unit="seconds",
    help="Seconds from the event, or from the time that a reconcile was due, to its start.",
    buckets=_RECONCILE_SECONDS,
)
QUEUE_OLDEST_SECONDS: Final = Gauge(
    name="kuberoll_operator_queue_oldest_seconds",
    unit="seconds",
    help="Age of the oldest job that is waiting or being reconciled; 0 while another operator leads.",
)

API_REQUESTS: Final = Counter(
    name="kuberoll_operator_api_requests_total",
    unit="requests",
    labels=("verb", "kind", "code"),
    help="Requests to the API server, without watches; code 0 means no answer.",
)
CACHED_OBJECTS: Final = Gauge(
    name="kuberoll_operator_cached_objects", unit="objects", labels=("kind",), help="Objects in the cache."
)
LEADER: Final = Gauge(name="kuberoll_operator_leader", unit="0 or 1", help="1 while this operator holds the lease.")

GROUPS: Final = (
    MetricGroup("Jobs", (JOBS, WAITING_JOBS, GENERATION_REPLICAS, GENERATION_GPUS, SCALINGS, MILESTONE_SECONDS)),
    MetricGroup(
        "Reconciling",
        (RECONCILES, RECONCILE_SECONDS, ERRORS, QUEUE_DEPTH, QUEUE_WAIT_SECONDS, QUEUE_OLDEST_SECONDS),
    ),
    MetricGroup("The operator itself", (API_REQUESTS, CACHED_OBJECTS, LEADER)),
)

METRICS: Final = metrics_by_name(GROUPS)
