"""Metrics of the rollout loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry

from kuberoll_api.metrics import Counter, Gauge, Histogram
from kuberoll_workers.data.causes import FailureKind
from kuberoll_workers.data.incidents import Incident
from kuberoll_workers.telemetry import definitions as metrics
from kuberoll_workers.telemetry.consumer import ConsumerMetrics
from kuberoll_workers.telemetry.direct import DirectMetrics
from kuberoll_workers.telemetry.idle import IdleMetrics
from kuberoll_workers.telemetry.meters import Collector, MeterPublisher, series_name
from kuberoll_workers.telemetry.routing import RoutingMetrics
from kuberoll_workers.telemetry.tallies import HistogramTally, counter, gauge, histogram

FLUSH_SECONDS = 0.1

_TURN_BUCKETS = ((1, "1"), (2, "2"), (4, "3-4"), (8, "5-8"), (16, "9-16"), (32, "17-32"))
_LAST_BUCKET = "33+"


def turn_bucket(turn: int) -> str:
    """Label of a turn number, counted from 1; one of a bounded set, with smaller buckets for the first turns."""
    for last, label in _TURN_BUCKETS:
        if turn <= last:
            return label
    return _LAST_BUCKET


class TrajectoryCounts(NamedTuple):
    """Counts of the trajectories of a worker's shards.

    Attributes:
        planned: Planned trajectories; None: unknown.
        stored: Durable trajectories, including those from before a restart.
        abandoned: Planned trajectories that will not be stored.
    """

    planned: int | None
    stored: int
    abandoned: int


class JournalMetrics:
    """Metrics of the journals of one job."""

    def __init__(self, job: str, registry: CollectorRegistry) -> None:
        self._seconds = histogram(metrics.JOURNAL_SYNC_SECONDS, registry).labels(job)
        self._errors = counter(metrics.JOURNAL_ERRORS, registry).labels(job)

    def observe(self, amount: float) -> None:
        """Count a write that took `amount` seconds."""
        self._seconds.observe(amount)

    def failed(self) -> None:
        """Count a failed write."""
        self._errors.inc()


class Activity(NamedTuple):
    """What a worker does now, and has done since its start.

    Attributes:
        generating, stepping: Trajectories that wait for generation, or for environments, now.
        turns, tokens: Finished turns and generated tokens.
        meters: What environments count themselves, summed over them, by `meters.series_name`.
    """

    generating: int
    stepping: int
    turns: int
    tokens: int
    meters: Mapping[str, float]


class RolloutMetrics:
    """All metrics of one job in this process.

    Attributes:
        read_counts: Called at each flush for the worker's counts; None: they are not published.
    """

    def __init__(self, job: str, registry: CollectorRegistry | None = None) -> None:
        """Register the metrics; each job of a process needs its own registry (by default a new one)."""
        self.job = job
        self.registry = registry = registry if registry is not None else CollectorRegistry()
        self.read_counts: Callable[[], TrajectoryCounts] | None = None
        self._counters = {
            name: counter(metric, registry)
            for name, metric in metrics.METRICS.items()
            if isinstance(metric, Counter) and metric.labels[:2] == ("rolloutjob", "environment")
        }
        self._planned = gauge(metrics.TRAJECTORIES_PLANNED, registry)
        self._stored = gauge(metrics.TRAJECTORIES_STORED, registry)
        self._abandoned = gauge(metrics.TRAJECTORIES_ABANDONED, registry)
        self._active = gauge(metrics.TRAJECTORIES_ACTIVE, registry)
        self._trajectories = self._counters[metrics.TRAJECTORIES.name]
        self._trajectory_seconds = histogram(metrics.TRAJECTORY_SECONDS, registry)
        self._trajectory_turns = histogram(metrics.TRAJECTORY_TURNS, registry)
        self._turns = self._counters[metrics.TURNS.name]
        self._waiting_seconds = histogram(metrics.TURN_WAITING_SECONDS, registry)
        self._generation_seconds = histogram(metrics.TURN_GENERATION_SECONDS, registry)
        self._environment_seconds = histogram(metrics.TURN_ENVIRONMENT_SECONDS, registry)
        self._timeout_seconds = gauge(metrics.ENVIRONMENT_TIMEOUT_SECONDS, registry)
        self._tokens = self._counters[metrics.TOKENS.name]
        self._reward = histogram(metrics.TRAJECTORY_REWARD, registry)
        self._reward_total = self._counters[metrics.REWARD.name]
        self._metered: dict[str, Collector] = {
            **self._counters,
            **{metric.name: gauge(metric, registry) for metric in metrics.METERED if isinstance(metric, Gauge)},
            **{metric.name: histogram(metric, registry) for metric in metrics.METERED if isinstance(metric, Histogram)},
        }
        self._lag = histogram(metrics.EVENT_LOOP_LAG_SECONDS, registry).labels(job)
        self.journal_seconds = JournalMetrics(job, registry)
        self._environments: dict[str, EnvironmentMetrics] = {}
        self.routing = RoutingMetrics(job, registry)
        self.idle = IdleMetrics(job, registry)
        self._registry = registry
        self._consumer: ConsumerMetrics | None = None
        self._direct: DirectMetrics | None = None

    @property
    def consumer(self) -> ConsumerMetrics:
        """The metrics of the trainer that consumes the run; a run without one has none."""
        if self._consumer is None:
            self._consumer = ConsumerMetrics(self.job, self._registry)
        return self._consumer

    @property
    def direct(self) -> DirectMetrics:
        """The metrics of the direct path; a worker that does not serve it has none."""
        if self._direct is None:
            self._direct = DirectMetrics(self.job, self._registry)
        return self._direct

    def environment(self, name: str) -> EnvironmentMetrics:
        """The metrics of one environment, with bound labels."""
        if name not in self._environments:
            self._environments[name] = EnvironmentMetrics(self, name)
        return self._environments[name]

    async def watch_event_loop(self, interval: float = 0.25) -> None:
        """Observe the lag of the running event loop and publish the counts each `interval` seconds until cancelled."""
        sampled = time.perf_counter()
        while True:
            before = time.perf_counter()
            await asyncio.sleep(interval)
            now = time.perf_counter()
            self._lag.observe(max(0.0, now - before - interval))
            self._sample_idleness(now - sampled)
            sampled = now
            self.flush()

    def _sample_idleness(self, seconds: float) -> None:
        activity, read_state = self.activity(), self.routing.read_state
        self.idle.sample(
            seconds,
            routing=None if read_state is None else read_state(),
            generating=activity.generating,
            stepping=activity.stepping,
        )

    def flush(self) -> None:
        """Publish the counts."""
        for environment in self._environments.values():
            environment.flush()
        self.routing.flush()
        if self.read_counts is not None:
            planned, stored, abandoned = self.read_counts()
            if planned is not None:
                self._planned.labels(self.job).set(planned)
            self._stored.labels(self.job).set(stored)
            self._abandoned.labels(self.job).set(abandoned)

    @property
    def generating(self) -> int:
        """Number of turns that wait for a response now."""
        return sum(environment.generating for environment in self._environments.values())

    def activity(self) -> Activity:
        """Count the work of this process, with that of unfinished trajectories."""
        environments = self._environments.values()
        meters: dict[str, float] = {}
        for environment in environments:
            for series, value in environment.meters.totals().items():
                name = series_name(series)
                meters[name] = meters.get(name, 0) + value
        return Activity(
            generating=self.generating,
            stepping=sum(environment.stepping for environment in environments),
            turns=sum(environment.turns for environment in environments),
            tokens=sum(environment.tokens for environment in environments),
            meters=meters,
        )


class _Turns:
    """The turns of one bucket that are not published yet."""

    __slots__ = ("_total", "environment", "generation", "waiting")

    def __init__(self, rollouts: RolloutMetrics, labels: tuple[str, str, str]) -> None:
        self.waiting = HistogramTally(metrics.TURN_WAITING_SECONDS, rollouts._waiting_seconds.labels(*labels))
        self.generation = HistogramTally(metrics.TURN_GENERATION_SECONDS, rollouts._generation_seconds.labels(*labels))
        self.environment = HistogramTally(
            metrics.TURN_ENVIRONMENT_SECONDS, rollouts._environment_seconds.labels(*labels)
        )
        self._total = rollouts._turns.labels(*labels)

    def flush(self) -> None:
        self._total.inc(self.generation.flush())
        self.waiting.flush()
        self.environment.flush()


class EnvironmentMetrics:
    """Metrics of one environment.

    Values that change with every turn or trajectory are kept in plain numbers and lists, and published a few times a
    second: a metric locks and checks on every change, which would take a quarter of the loop's own time.

    Attributes:
        generating, stepping: Number of trajectories that wait for generation, or for the environment, now.
        turns, tokens: Finished turns and generated tokens since the start.
        meters: Publishes what the environment counts itself.
    """

    def __init__(self, rollouts: RolloutMetrics, name: str) -> None:
        self._rollouts = rollouts
        self._labels = labels = (rollouts.job, name)
        self._tokens = {
            kind: rollouts._tokens.labels(*labels, kind) for kind in ("prompt", "cached", "generated", "environment")
        }
        self._active = {state: rollouts._active.labels(*labels, state) for state in ("generation", "environment")}
        self._by_bucket: dict[str, _Turns] = {}
        self._by_turn: dict[int, _Turns] = {}
        self._prompt = self._cached = self._generated = self._observed = 0
        self._flushed = time.perf_counter()
        self._stops: dict[str, int] = {}
        self._reward = HistogramTally(metrics.TRAJECTORY_REWARD, rollouts._reward.labels(*labels))
        self._turns = HistogramTally(metrics.TRAJECTORY_TURNS, rollouts._trajectory_turns.labels(*labels))
        self._seconds = HistogramTally(metrics.TRAJECTORY_SECONDS, rollouts._trajectory_seconds.labels(*labels))
        self._gained = self._lost = 0.0
        self.generating = self.stepping = 0
        self.turns = self.tokens = 0
        self.meters = MeterPublisher(rollouts._metered, labels)
        # Start at 0: Prometheus does not see the increase of a series that first appears above 0.
        rollouts._trajectories.labels(*labels, "failed")
        for stage in ("generation", "environment"):
            self.count(metrics.RETRIES, stage, amount=0)
            for kind in get_args(FailureKind):
                self.count(metrics.FAILURES, kind, stage, amount=0)
        for wasted in (metrics.WASTED_SECONDS, metrics.WASTED_TOKENS):
            for kind in get_args(FailureKind):
                rollouts._counters[wasted.name].labels(*labels, kind)

    def count(self, metric: Counter, *labels: str, amount: float = 1) -> None:
        """Count what is rare, by a counter of `definitions` whose labels are the job, the environment, and these.

        A new counter needs nothing here. What happens in every turn is tallied instead, and published at a flush.
        """
        self._rollouts._counters[metric.name].labels(*self._labels, *labels).inc(amount)

    def set_step_timeout(self, seconds: float) -> None:
        """Set the time limit of a step."""
        self._rollouts._timeout_seconds.labels(*self._labels).set(seconds)

    def record_response(self, *, prompt: int, cached: int, generated: int) -> None:
        """Count a response: prompt tokens sent, those of them reused by the engine, and generated tokens."""
        self._prompt += prompt
        self._cached += cached
        self._generated += generated
        self.tokens += generated

    def record_turn(
        self,
        turn: int,
        *,
        waiting_seconds: float,
        generation_seconds: float,
        environment_seconds: float,
        observed: int,
    ) -> None:
        """Count a finished turn, numbered from 1; `observed` is the number of tokens of its observation."""
        turns = self._by_turn.get(turn) or self._first(turn)
        turns.waiting.observe(waiting_seconds)
        turns.generation.observe(generation_seconds)
        turns.environment.observe(environment_seconds)
        self._observed += observed
        self.turns += 1

    def _first(self, turn: int) -> _Turns:
        bucket = turn_bucket(turn)
        turns = self._by_bucket.get(bucket)
        if turns is None:
            turns = self._by_bucket[bucket] = _Turns(self._rollouts, (*self._labels, bucket))
        self._by_turn[turn] = turns
        return turns

    def flush(self) -> None:
        """Publish the counts."""
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
        for turns in self._by_bucket.values():
            turns.flush()
        self._flush_trajectories()
        self.meters.flush()

    def _flush_trajectories(self) -> None:
        stops, self._stops = self._stops, {}
        for stop_reason, count in stops.items():
            self._rollouts._trajectories.labels(*self._labels, stop_reason).inc(count)
        for tally in (self._reward, self._turns, self._seconds):
            tally.flush()
        gained, lost = self._gained, self._lost
        self._gained = self._lost = 0.0
        self._rollouts._reward_total.labels(*self._labels, "positive").inc(gained)
        self._rollouts._reward_total.labels(*self._labels, "negative").inc(lost)

    def flush_if_due(self) -> None:
        """Publish the counts if `FLUSH_SECONDS` have passed; called whenever a trajectory ends."""
        if time.perf_counter() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def record_finish(self, *, stop_reason: str, reward: float, turns: int, seconds: float) -> None:
        """Count a finished trajectory."""
        self._stops[stop_reason] = self._stops.get(stop_reason, 0) + 1
        if reward < 0:
            self._lost -= reward
        else:
            self._gained += reward
        self._reward.observe(reward)
        self._turns.observe(turns)
        self._seconds.observe(seconds)

    def record_failure(self, *, kind: str, stage: str, seconds: float, tokens: int) -> None:
        """Count a trajectory that failed permanently, and what it has cost."""
        self.count(metrics.WASTED_SECONDS, kind, amount=seconds)
        self.count(metrics.WASTED_TOKENS, kind, amount=tokens)
        self._stops["failed"] = self._stops.get("failed", 0) + 1
        self.count(metrics.FAILURES, kind, stage)

    def record_drop(self, *, reason: str, tokens: int) -> None:
        """Count a dropped trajectory and its generated tokens."""
        self.count(metrics.DROPPED_TRAJECTORIES, reason)
        self.count(metrics.DROPPED_TOKENS, reason, amount=tokens)

    def record_prefix_violation(self) -> None:
        """Count a trajectory whose context was not the concatenation of its messages."""
        self.count(metrics.PREFIX_VIOLATIONS)

    def record_resume(self, turns: int) -> None:
        """Count the turns of a resumed trajectory from before the interruption."""
        self.count(metrics.RESUMED_TURNS, amount=turns)

    def record_episode(self) -> None:
        """Count an episode that began."""
        self.count(metrics.EPISODES)

    def record_close(self, done: bool) -> None:
        """Count the `close` of an episode; `done` is False if it failed."""
        self.count(metrics.EPISODES_CLOSED, "closed" if done else "failed")

    def record_recovery(self, recovery: str) -> None:
        """Count the loss of an episode."""
        self.count(metrics.EPISODE_RECOVERIES, recovery)

    def record_calls(self, continuity: Mapping[str, int]) -> None:
        """Count an agent's calls by how they continued others."""
        for name, count in continuity.items():
            self.count(metrics.AGENT_CALLS, name, amount=count)

    def record_incident(self, incident: Incident) -> None:
        """Count what went wrong with a trajectory that goes on, and what that has cost."""
        kind = incident.kind
        self.count(metrics.INCIDENTS, kind, incident.reason)
        self.count(metrics.WASTED_SECONDS, kind, amount=incident.seconds)
        self.count(metrics.WASTED_TOKENS, kind, amount=incident.tokens)

    def record_retry(self, stage: str) -> None:
        """Count a retry."""
        self.count(metrics.RETRIES, stage)
