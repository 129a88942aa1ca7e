"""Metrics of request routing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, get_args

from prometheus_client import CollectorRegistry

from kuberoll_workers.telemetry import definitions as metrics
from kuberoll_workers.telemetry.tallies import counter, gauge

RequestOutcome = Literal["answered", "overloaded", "unreachable", "failed", "lost", "refused", "aborted"]
"""Outcome of a request. `failed`: broken connections and malformed responses; `lost`: the replica gave no sign of life,
and the request was sent to another one; `aborted`: cancelled by the caller."""

VAIN_OUTCOMES: Final[tuple[RequestOutcome, ...]] = ("failed", "lost", "aborted")
"""Outcomes of requests that a replica may have worked on."""

MOVE_CAUSES = ("gone", "broken", "failed", "overload")
"""Reasons for moving a trajectory to another replica."""

_REPLICA_STATES = ("closed", "open", "half-open", "leaving")


class Unanswering(NamedTuple):
    """A replica that does not answer.

    Attributes:
        url: Its base URL.
        since: Unix time of its last sign of life, or from when it has been tried since.
        problem: Why it counts as one that does not answer.
        requests: Requests that were in flight there when it was found out, and open sessions.
    """

    url: str
    since: float
    problem: str
    requests: int


class RoutingState(NamedTuple):
    """Present state of routing.

    Attributes:
        waiting: Number of requests that wait for a replica.
        window: Number of concurrent requests that the replicas take, as far as known.
        replicas: Number of replicas by the state of their circuit breaker; `leaving`: no longer listed.
        idle: Number of usable replicas without a request, of this worker or another, as far as known.
        usable: Number of replicas that get requests.
        unanswering: Those that do not answer, the ones that have been silent for longest first.
    """

    waiting: int
    window: int
    replicas: Mapping[str, int]
    idle: int = 0
    usable: int = 0
    unanswering: Sequence[Unanswering] = ()


class RoutingMetrics:
    """Metrics of request routing, counted in plain numbers and published by `flush`.

    Attributes:
        policy_version: Policy version of the newest response; None: unknown.
        read_state: Called for the state at each flush.
    """

    def __init__(self, job: str, registry: CollectorRegistry | None = None) -> None:
        """Register the metrics, in a new registry by default."""
        registry = registry if registry is not None else CollectorRegistry()
        self.policy_version: str | None = None
        self.read_state: Callable[[], RoutingState] | None = None
        self._job = job
        self._outcomes: dict[str, int] = {}
        self._vain: dict[str, float] = {}
        self._moves: dict[str, int] = {}
        self._answered = 0
        self._requests_total = counter(metrics.POLICY_REQUESTS, registry)
        self._vain_total = counter(metrics.POLICY_VAIN_SECONDS, registry)
        self._moves_total = counter(metrics.SESSIONS_MOVED, registry)
        self._replicas = gauge(metrics.POLICY_REPLICAS, registry)
        self._waiting = gauge(metrics.POLICY_WAITING_REQUESTS, registry)
        self._window = gauge(metrics.POLICY_WINDOW_REQUESTS, registry)
        # Start at 0: Prometheus does not see the increase of a series that first appears above 0.
        for outcome in get_args(RequestOutcome):
            self._requests_total.labels(job, outcome)
        for outcome in VAIN_OUTCOMES:
            self._vain_total.labels(job, outcome)
        for cause in MOVE_CAUSES:
            self._moves_total.labels(job, cause)

    def record_answer(self, versions: Sequence[tuple[str, int, int]]) -> None:
        """Count a response; `versions` are its spans of policy versions."""
        self._answered += 1
        if versions:
            self.policy_version = versions[-1][0]

    def record_request(self, outcome: RequestOutcome, seconds: float = 0.0) -> None:
        """Count a request without a response.

        Args:
            seconds: How long a replica had it; counted of those whose generation was in vain (`VAIN_OUTCOMES`).
        """
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        if outcome in VAIN_OUTCOMES:
            self._vain[outcome] = self._vain.get(outcome, 0.0) + seconds

    def record_move(self, cause: str) -> None:
        """Count a trajectory that moves to another replica."""
        self._moves[cause] = self._moves.get(cause, 0) + 1

    def flush(self) -> None:
        """Publish the counts."""
        outcomes, self._outcomes = {**self._outcomes, "answered": self._answered}, {}
        moves, self._moves = self._moves, {}
        vain, self._vain = self._vain, {}
        self._answered = 0
        for outcome, count in outcomes.items():
            self._requests_total.labels(self._job, outcome).inc(count)
        for outcome, seconds in vain.items():
            self._vain_total.labels(self._job, outcome).inc(seconds)
        for cause, count in moves.items():
            self._moves_total.labels(self._job, cause).inc(count)
        if self.read_state is not None:
            state = self.read_state()
            for name in _REPLICA_STATES:
                self._replicas.labels(self._job, name).set(state.replicas.get(name, 0))
            self._waiting.labels(self._job).set(state.waiting)
            self._window.labels(self._job).set(state.window)
