"""Prometheus metrics of the rollout loop.

Labels are bounded: job, environment, stop reason, turn bucket, never a sample's id. With `PROMETHEUS_MULTIPROC_DIR`
set before this module is imported, several worker processes share one endpoint (prometheus_client's multiprocess
mode), which is how `kuberoll run` serves them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_REWARDS = (-10.0, -5.0, -2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
_TURNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_LAG_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)

_TURN_BUCKETS = ((1, "1"), (2, "2"), (4, "3-4"), (8, "5-8"), (16, "9-16"), (32, "17-32"))

FLUSH_SECONDS = 0.1


def turn_bucket(turn: int) -> str:
    """Label of a turn's number, counted from 1: a bounded set, finer where most turns are."""
    for last, label in _TURN_BUCKETS:
        if turn <= last:
            return label
    return "33+"


class RolloutMetrics:
    """All metrics of one job in this process."""

    def __init__(self, job: str, registry: CollectorRegistry | None = None) -> None:
        """Register the metrics; each job of a process needs a registry of its own (by default a new one)."""
        self.job = job
        self.registry = registry if registry is not None else CollectorRegistry()
        labels = ("job", "environment")
        self._generation_seconds = self._histogram(
            "kuberoll_turn_generation_seconds",
            "Wall seconds that a turn waited for its generation, queueing and retries included.",
            (*labels, "turn"),
            _SECONDS,
        )
        self._environment_seconds = self._histogram(
            "kuberoll_turn_environment_seconds",
            "Wall seconds that a turn waited for its environment step, queueing and retries included.",
            (*labels, "turn"),
            _SECONDS,
        )
        self._turns = self._counter("kuberoll_turns_total", "Turns finished.", (*labels, "turn"))
        self._tokens = self._counter(
            "kuberoll_tokens_total",
            "Tokens by kind: prompt (sent, every turn anew), cached (of those, reused by the engine), generated, "
            "environment.",
            (*labels, "kind"),
        )
        self._trajectories = self._counter(
            "kuberoll_trajectories_total",
            "Trajectories ended, by stop reason; failed ones are those given up.",
            (*labels, "stop_reason"),
        )
        self._reward = self._histogram(
            "kuberoll_trajectory_reward", "Total reward of a finished trajectory.", labels, _REWARDS
        )
        # A histogram with buckets below 0 has no sum, and a counter must not fall: hence the two signs.
        self._reward_total = self._counter(
            "kuberoll_reward_total",
            "Rewards of finished trajectories added up, positive and negative ones apart, as absolute values.",
            (*labels, "sign"),
        )
        self._trajectory_turns = self._histogram(
            "kuberoll_trajectory_turns", "Turns of a finished trajectory.", labels, _TURNS
        )
        self._trajectory_seconds = self._histogram(
            "kuberoll_trajectory_seconds", "Wall seconds of a finished trajectory.", labels, _SECONDS
        )
        self._active = Gauge(
            "kuberoll_trajectories_active",
            "Trajectories in flight, by what they wait for.",
            (*labels, "state"),
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self._failures = self._counter(
            "kuberoll_failures_total",
            "Trajectories given up, by who was at fault and at what stage.",
            (*labels, "kind", "stage"),
        )
        self._dropped = self._counter(
            "kuberoll_dropped_trajectories_total",
            "Trajectories that nobody wanted in the end: oversampled ones, and groups that were filtered out.",
            (*labels, "reason"),
        )
        self._dropped_tokens = self._counter(
            "kuberoll_dropped_tokens_total", "Tokens generated for dropped trajectories.", (*labels, "reason")
        )
        self._prefix_violations = self._counter(
            "kuberoll_prefix_violations_total",
            "Trajectories given up because their context was not what was sent and sampled: a bug of the policy.",
            labels,
        )
        self._resumed_turns = self._counter(
            "kuberoll_resumed_turns_total", "Turns taken over from before an interruption.", labels
        )
        self._retries = self._counter("kuberoll_retries_total", "Operations tried again.", (*labels, "stage"))
        self.journal_seconds = self._histogram(
            "kuberoll_journal_sync_seconds", "Wall seconds of one journal write and sync.", ("job",), _SECONDS
        ).labels(job)
        self._lag = self._histogram(
            "kuberoll_event_loop_lag_seconds", "How late the event loop ran a timer.", ("job",), _LAG_SECONDS
        ).labels(job)
        self._environments: dict[str, EnvironmentMetrics] = {}
        self.routing = RoutingMetrics(job, self.registry)

    def environment(self, name: str) -> EnvironmentMetrics:
        """The metrics of one environment, their labels bound once."""
        if name not in self._environments:
            self._environments[name] = EnvironmentMetrics(self, name)
        return self._environments[name]

    async def watch_event_loop(self, interval: float = 0.25) -> None:
        """Observe the lag of the running event loop, and hand on what has been counted, until cancelled."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(interval)
            self._lag.observe(max(0.0, time.perf_counter() - before - interval))
            self.flush()

    def flush(self) -> None:
        """Hand on what has been counted."""
        for environment in self._environments.values():
            environment.flush()
        self.routing.flush()

    @property
    def generating(self) -> int:
        """Turns that wait for a response now."""
        return sum(environment.generating for environment in self._environments.values())

    def _counter(self, name: str, text: str, labels: Iterable[str]) -> Counter:
        return Counter(name, text, tuple(labels), registry=self.registry)

    def _histogram(self, name: str, text: str, labels: Iterable[str], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, tuple(labels), registry=self.registry, buckets=buckets)


RequestOutcome = Literal["answered", "overloaded", "unreachable", "failed", "refused", "aborted"]
"""`failed`: broken connections and answers that are none; `aborted`: nobody wanted the answer any more."""

_REPLICA_STATES = ("closed", "open", "half-open", "leaving")


class RoutingState(NamedTuple):
    """What routing is like now.

    Attributes:
        waiting: Requests that wait for a replica to take them.
        window: Requests that the replicas take at once, as far as it is known.
        replicas: How many there are, by the state of their circuit breaker; `leaving`: not listed any more.
    """

    waiting: int
    window: int
    replicas: Mapping[str, int]


class RoutingMetrics:
    """The metrics of the way to the replicas; counted in plain numbers, and handed on by `flush`.

    Attributes:
        policy_version: Of the newest response; None: none has said it.
        watch: Asked for the state at each flush.
    """

    def __init__(self, job: str, registry: CollectorRegistry | None = None) -> None:
        """Register the metrics, in a new registry by default."""
        registry = registry if registry is not None else CollectorRegistry()
        self.policy_version: str | None = None
        self.watch: Callable[[], RoutingState] | None = None
        self._job = job
        self._outcomes: dict[str, int] = {}
        self._moves: dict[str, int] = {}
        self._answered = 0
        self._requests_total = Counter(
            "kuberoll_policy_requests_total",
            "Requests sent to replicas, by what came of them; only those answered cost the trajectory anything.",
            ("job", "outcome"),
            registry=registry,
        )
        self._moves_total = Counter(
            "kuberoll_sessions_moved_total",
            "Trajectories that went on at another replica, without their prefix in its cache, by cause.",
            ("job", "cause"),
            registry=registry,
        )
        self._replicas = self._gauge(
            "kuberoll_policy_replicas",
            "Replicas that this worker knows, by the state of their circuit breaker.",
            ("job", "state"),
            registry,
            "livemax",
        )
        self._waiting = self._gauge(
            "kuberoll_policy_waiting_requests",
            "Requests that wait in the worker until a replica has room for them.",
            ("job",),
            registry,
            "livesum",
        )
        self._window = self._gauge(
            "kuberoll_policy_window_requests",
            "Requests that the worker sends at once, over all replicas, at most: learned from their refusals.",
            ("job",),
            registry,
            "livesum",
        )

    def answered(self, versions: Sequence[tuple[str, int, int]]) -> None:
        """One response and the spans of its policy versions."""
        self._answered += 1
        if versions:
            self.policy_version = versions[-1][0]

    def request(self, outcome: RequestOutcome) -> None:
        """One request that came to no response."""
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1

    def moved(self, cause: str) -> None:
        """One trajectory that goes on elsewhere."""
        self._moves[cause] = self._moves.get(cause, 0) + 1

    def flush(self) -> None:
        """Hand on what has been counted."""
        outcomes, self._outcomes = {**self._outcomes, "answered": self._answered}, {}
        moves, self._moves = self._moves, {}
        self._answered = 0
        for outcome, count in outcomes.items():
            self._requests_total.labels(self._job, outcome).inc(count)
        for cause, count in moves.items():
            self._moves_total.labels(self._job, cause).inc(count)
        if self.watch is not None:
            state = self.watch()
            for name in _REPLICA_STATES:
                self._replicas.labels(self._job, name).set(state.replicas.get(name, 0))
            self._waiting.labels(self._job).set(state.waiting)
            self._window.labels(self._job).set(state.window)

    @staticmethod
    def _gauge(
        name: str,
        text: str,
        labels: tuple[str, ...],
        registry: CollectorRegistry,
        mode: Literal["livemax", "livesum"],
    ) -> Gauge:
        return Gauge(name, text, labels, registry=registry, multiprocess_mode=mode)


class EnvironmentMetrics:
    """The metrics of one environment.

    What changes several times a turn is counted in plain numbers and handed on at most every `FLUSH_SECONDS`: a metric
    is locked and checked on every change, which would be a quarter of the loop's own time.

    Attributes:
        generating, stepping: Trajectories that wait for their generation, or environment, now.
    """

    def __init__(self, metrics: RolloutMetrics, name: str) -> None:
        self._metrics = metrics
        self._labels = (metrics.job, name)
        self._tokens = {
            kind: metrics._tokens.labels(*self._labels, kind)
            for kind in ("prompt", "cached", "generated", "environment")
        }
        self._active = {state: metrics._active.labels(*self._labels, state) for state in ("generation", "environment")}
        self._by_turn: dict[str, tuple[Histogram, Histogram, Counter]] = {}
        self._turns: dict[str, int] = {}
        self._prompt = self._cached = self._generated = self._observed = 0
        self._flushed = time.perf_counter()
        self.generating = self.stepping = 0

    def generated(self, *, prompt: int, cached: int, generated: int) -> None:
        """One response: tokens sent, of those reused by the engine, and generated."""
        self._prompt += prompt
        self._cached += cached
        self._generated += generated

    def turn(self, turn: int, *, generation_seconds: float, environment_seconds: float, observed: int) -> None:
        """One finished turn, numbered from 1, and the tokens of its observation."""
        bucket = turn_bucket(turn)
        bound = self._by_turn.get(bucket)
        if bound is None:
            metrics, labels = self._metrics, (*self._labels, bucket)
            bound = self._by_turn[bucket] = (
                metrics._generation_seconds.labels(*labels),
                metrics._environment_seconds.labels(*labels),
                metrics._turns.labels(*labels),
            )
        bound[0].observe(generation_seconds)
        bound[1].observe(environment_seconds)
        self._turns[bucket] = self._turns.get(bucket, 0) + 1
        self._observed += observed
        if time.perf_counter() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hand on what has been counted."""
        self._flushed = time.perf_counter()
        counts = {
            "prompt": self._prompt,
            "cached": self._cached,
            "generated": self._generated,
            "environment": self._observed,
        }
        self._prompt = self._cached = self._generated = self._observed = 0
        for kind, count in counts.items():
            self._tokens[kind].inc(count)
        self._active["generation"].set(self.generating)
        self._active["environment"].set(self.stepping)
        turns, self._turns = self._turns, {}
        for bucket, count in turns.items():
            self._by_turn[bucket][2].inc(count)

    def ended(self) -> None:
        """One trajectory has left the loop, however it ended."""
        if self.generating == self.stepping == 0 or time.perf_counter() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def finished(self, *, stop_reason: str, reward: float, turns: int, seconds: float) -> None:
        """One finished trajectory."""
        metrics = self._metrics
        metrics._trajectories.labels(*self._labels, stop_reason).inc()
        metrics._reward.labels(*self._labels).observe(reward)
        sign = "negative" if reward < 0 else "positive"
        metrics._reward_total.labels(*self._labels, sign).inc(abs(reward))
        metrics._trajectory_turns.labels(*self._labels).observe(turns)
        metrics._trajectory_seconds.labels(*self._labels).observe(seconds)

    def failed(self, *, kind: str, stage: str) -> None:
        """One trajectory given up."""
        self._metrics._trajectories.labels(*self._labels, "failed").inc()
        self._metrics._failures.labels(*self._labels, kind, stage).inc()

    def dropped(self, *, reason: str, tokens: int) -> None:
        """One trajectory that is not wanted, with so many generated tokens."""
        self._metrics._dropped.labels(*self._labels, reason).inc()
        self._metrics._dropped_tokens.labels(*self._labels, reason).inc(tokens)

    def prefix_broken(self) -> None:
        """One trajectory whose context was not the concatenation of its messages."""
        self._metrics._prefix_violations.labels(*self._labels).inc()

    def resumed(self, turns: int) -> None:
        """Turns that a trajectory had already when it was admitted."""
        self._metrics._resumed_turns.labels(*self._labels).inc(turns)

    def retried(self, stage: str) -> None:
        """One operation tried again."""
        self._metrics._retries.labels(*self._labels, stage).inc()
