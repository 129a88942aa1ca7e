"""Replay of a trace: real workers' loops and routers, in virtual time, on modelled replicas."""

from __future__ import annotations

import asyncio
import gc
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.prompts import Prompt, Sample, SampleGroup
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.data.shards import shard_of
from kuberoll_workers.environments.batches import Batch
from kuberoll_workers.environments.executor import Executor
from kuberoll_workers.environments.hooks import NO_HOOKS, Hooks
from kuberoll_workers.environments.interface import ChatMessage, Metadata
from kuberoll_workers.environments.outcome import StepOutcome
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, SamplingParameters
from kuberoll_workers.policy.routing.router import RoutedPolicy
from kuberoll_workers.policy.routing.scheduler import RequestScheduler
from kuberoll_workers.rollouts.groups import Result
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.scheduling import run_groups
from kuberoll_workers.rollouts.settings import RolloutSettings, Scheduling
from kuberoll_workers.simulation.candidates import Admission, CandidateScheduler, Routing
from kuberoll_workers.simulation.engine_model import EngineLimits, EngineTally, check_amount
from kuberoll_workers.simulation.fleet import Fleet, ModelledReplica, Task, Waits, tokens_of_length
from kuberoll_workers.simulation.idle import IdleLedger
from kuberoll_workers.simulation.trace import TraceTrajectory, groups_of
from kuberoll_workers.simulation.virtual_loop import run_virtually
from kuberoll_workers.telemetry import RolloutMetrics, RoutingMetrics

_NO_LIMIT = 1e9


class ReplayRefused(ValueError):
    """The fleet cannot play the trace; the message has the trajectory and the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """A fleet, and what happens to it.

    Attributes:
        concurrency: Trajectories in flight in each worker; with Lockstep, the size of a batch.
        routing, admission: See `candidates`.
        margin: For the routing `Margin`, in trajectories.
        window: Requests that a replica takes at once.
        request_seconds: Time of a request outside of the engine: network, Serve, and the worker.
        cold_start_seconds: Time until the first replicas answer, and until a replica answers that replaces a dead one.
        deaths_per_hour: Mean number of replicas of the fleet that die in an hour.
        weights_every: Seconds between two versions of the weights; 0: they do not change.
        weights_seconds: Time for which all replicas load them; what they had cached is lost.
        seed: Of deaths and of jitter.
    """

    engine: EngineLimits
    replicas: int = 1
    workers: int = 1
    concurrency: int = 64
    window: int = 1024
    routing: Routing = "Session"
    admission: Admission = "Resident"
    margin: int = 8
    scheduling: Scheduling = "Concurrent"
    request_seconds: float = 0.0
    cold_start_seconds: float = 0.0
    deaths_per_hour: float = 0.0
    weights_every: float = 0.0
    weights_seconds: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("replicas", "workers", "concurrency", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: found {getattr(self, name)}; it is at least 1")
        for name in ("request_seconds", "cold_start_seconds", "deaths_per_hour", "weights_every", "weights_seconds"):
            check_amount(name, getattr(self, name))
        if self.weights_every and self.weights_seconds + self.engine.step_seconds >= self.weights_every:
            raise ValueError(
                f"weights_seconds: found {self.weights_seconds:g}; with a step of {self.engine.step_seconds:g} s it is "
                f"less than weights_every ({self.weights_every:g}), else replicas do nothing but load weights"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay has measured; times are virtual.

    Attributes:
        makespan: Seconds until the last trajectory ended.
        turns, generated: Turns of the trajectories that finished, and tokens that they generated.
        failures: Trajectories that failed, by stage and kind, as in their records.
        first_failure: Cause of the first one.
        tallies: Of each replica that there was.
        ledger: Busy and idle engine seconds.
        waits: Of all requests.
        possible: Prompt tokens that caches without bounds would have had.
        deaths, moves: Replicas that died, and trajectories that changed their replica.
        turn_seconds: Time of each turn's generation as the loop saw it, by the clock of its event loop.
    """

    makespan: float
    turns: int
    generated: int
    failures: Mapping[str, int]
    first_failure: str | None
    tallies: Sequence[EngineTally]
    ledger: IdleLedger
    waits: Waits
    possible: int
    deaths: int
    moves: int
    turn_seconds: array[float]


def replay(trajectories: Sequence[TraceTrajectory], settings: ReplaySettings) -> Replayed:
    """Play a trace; the same trace and settings give the same result.

    Raises:
        ReplayRefused: A trajectory does not fit into a replica's cache, or is not computed between two versions.
        NothingLeft, TimeEnds: The replay does not come to its end.
    """
    engine = settings.engine
    room, name = engine.kv_cache_tokens // engine.block_tokens * engine.block_tokens, "kv_cache_tokens"
    if not engine.chunked_prefill and engine.max_num_batched_tokens < room:
        room, name = engine.max_num_batched_tokens, "max_num_batched_tokens, since prompts are computed as a whole,"
    for trajectory in trajectories:
        if trajectory.length > room:
            raise ReplayRefused(
                f"group {trajectory.group}, sample {trajectory.sample}: it has {trajectory.length} tokens, which do "
                f"not fit into {name} ({room})"
            )
    if settings.weights_every:
        _check_weights(max((trajectory.length for trajectory in trajectories), default=0), settings)
    with _no_collection():
        return run_virtually(_Replay(trajectories, settings).run())


def _check_weights(longest: int, settings: ReplaySettings) -> None:
    """Check that the longest context can be computed before new weights come, after which it is computed again."""
    engine = settings.engine
    tokens = engine.max_num_batched_tokens
    # The step that is under way when they come is still completed.
    whole = (longest - 1) // tokens * (engine.step_seconds + tokens * engine.prefill_seconds)
    if whole >= settings.weights_every - settings.weights_seconds:
        raise ReplayRefused(
            f"weights_every: found {settings.weights_every:g}; the longest trajectory has {longest} tokens, and new "
            f"weights would come before they are computed again, which takes more than {whole:.3g} s"
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no cycles: there are hardly any, and a look at all that is in flight takes a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Replay:
    def __init__(self, trajectories: Sequence[TraceTrajectory], settings: ReplaySettings) -> None:
        self._settings = settings
        self._trajectories = trajectories
        self._groups = groups_of(trajectories)
        self._numbers = {(item.group, item.sample): number for number, item in enumerate(trajectories)}
        self._lasting = max((item.length for item in trajectories), default=0)
        self._most_turns = max((len(item.turns) for item in trajectories), default=0)
        self._environments = dict.fromkeys(item.environment for item in trajectories)
        # Nobody reads them, and creating them for each of 512 workers takes seconds.
        self._metrics, self._routing_metrics = RolloutMetrics("replay"), _MoveCounter(self._count_move)
        self._draw = random.Random(settings.seed)
        self._fleet = Fleet()
        self._waits = Waits()
        self._asked: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._possible = self._turns = self._generated = self._deaths = self._moves = 0
        self._failures: Counter[str] = Counter()
        self._first_failure: str | None = None
        self._turn_seconds = array("f")
        self._begun_groups: set[int] = set()

    async def run(self) -> Replayed:
        loop = asyncio.get_running_loop()
        self._ledger = IdleLedger(unbegun=len(self._trajectories))
        settings = self._settings
        for _ in range(settings.replicas):
            self._add_replica()
        happenings = [asyncio.create_task(work) for work in (self._start_all(), self._deaths_come(), self._publish())]
        try:
            async with asyncio.TaskGroup() as workers:
                for worker in range(settings.workers):
                    workers.create_task(self._worker(worker))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for task in happenings:
                task.cancel()
            await asyncio.gather(*happenings, return_exceptions=True)
        makespan = loop.time()
        self._ledger.close(makespan)
        return Replayed(
            makespan=makespan,
            turns=self._turns,
            generated=self._generated,
            failures=dict(sorted(self._failures.items())),
            first_failure=self._first_failure,
            tallies=[replica.engine.tally for replica in self._fleet.replicas],
            ledger=self._ledger,
            waits=self._waits,
            possible=self._possible,
            deaths=self._deaths,
            moves=self._moves,
            turn_seconds=self._turn_seconds,
        )

    async def _worker(self, worker: int) -> None:
        settings = self._settings
        # As a worker's own: the loop admits new trajectories by their share of each replica's cache.
        share = 0.0 if settings.scheduling == "Lockstep" else 1 / settings.workers
        async with AsyncExitStack() as stack:
            router = await stack.enter_async_context(
                RoutedPolicy(
                    self._fleet,
                    self._fleet.connector(self),
                    sticky=settings.routing == "Session",
                    share=share,
                    metrics=self._routing_metrics,
                    jitter_seed=settings.seed + worker,
                    scheduler=self._scheduler(worker),
                )
            )
            environment = _RecordedEnvironment(self._trajectories, self._ledger)
            rollout = Rollout(
                policy=_WatchedPolicy(router, self),
                environments=dict.fromkeys(self._environments, environment),
                tokenizer=_CountTokenizer(),
                settings=RolloutSettings(
                    max_turns=self._most_turns + 1,
                    max_sequence_length=self._lasting + 2,
                    concurrency=settings.concurrency,
                    sampling=SamplingParameters(max_tokens=self._lasting + 2),
                    scheduling=settings.scheduling,
                    generation_seconds=_NO_LIMIT,
                ),
                metrics=self._metrics,
                jitter_seed=settings.seed + worker,
            )
            await run_groups(rollout, self._samples(worker), self._take)

    def _scheduler(self, worker: int) -> RequestScheduler | None:
        """A scheduler with the candidates of the settings; None: they have none."""
        settings = self._settings
        if settings.routing in ("Session", "LeastLoaded") and settings.admission == "Resident":
            return None
        return CandidateScheduler(
            routing=settings.routing,
            admission=settings.admission,
            margin=settings.margin,
            moved=self._routing_metrics.record_move,
            seed=settings.seed + worker,
        )

    def _count_move(self) -> None:
        self._moves += 1

    async def _take(self, result: Result) -> None:
        if not isinstance(result, TrajectoryRecord):
            assert isinstance(result, FailureRecord)
            self._failures[f"{result.stage}: {result.kind}"] += 1
            self._first_failure = self._first_failure or result.cause
            return
        self._turns += result.turn_count
        self._generated += result.tokens.generated
        self._turn_seconds.extend(result.timing.generation_seconds)

    def _samples(self, worker: int) -> Iterator[SampleGroup]:
        for group, members in self._groups.items():
            if shard_of(group, self._settings.workers) == worker:
                samples = tuple(self._sample(member) for member in members)
                yield SampleGroup(samples=samples, keep=len(samples))

    def _sample(self, trajectory: TraceTrajectory) -> Sample:
        ids = tokens_of_length(trajectory.prompt)
        number = self._numbers[trajectory.group, trajectory.sample]
        prompt = Prompt(
            task_index=trajectory.group,
            task_name=trajectory.environment,
            idx=trajectory.group,
            messages=(Message("user", "", ids),),
            token_ids=ids,
            metadata={"trajectory": number, "turn": 0},
            stop_strings=None,
            sampling={},
        )
        return Sample(prompt=prompt, rollout_index=trajectory.sample, seed=None)

    def _add_replica(self) -> ModelledReplica:
        replica = ModelledReplica(
            f"replica-{len(self._fleet.replicas)}",
            self._settings.engine,
            window=self._settings.window,
            request_seconds=self._settings.request_seconds,
            lookup=self._task,
            ledger=self._ledger,
            waits=self._waits,
        )
        self._fleet.add(replica)
        return replica

    async def _start_all(self) -> None:
        if self._settings.cold_start_seconds:
            await asyncio.sleep(self._settings.cold_start_seconds)
        for replica in self._fleet.replicas:
            replica.start()
        self._fleet.list_alive()

    async def _deaths_come(self) -> None:
        if not self._settings.deaths_per_hour:
            return
        async with asyncio.TaskGroup() as successors:
            while True:
                await asyncio.sleep(self._draw.expovariate(self._settings.deaths_per_hour / 3600))
                alive = [replica for replica in self._fleet.replicas if replica.alive]
                if alive:
                    self._deaths += 1
                    (dead := self._draw.choice(alive)).die()
                    self._fleet.list_alive()
                    successors.create_task(self._replace(dead))

    async def _replace(self, dead: ModelledReplica) -> None:
        await asyncio.sleep(self._settings.cold_start_seconds)
        dead.leave()
        self._add_replica().start()
        self._fleet.list_alive()

    async def _publish(self) -> None:
        while self._settings.weights_every:
            await asyncio.sleep(self._settings.weights_every)
            for replica in self._fleet.replicas:
                replica.pause(self._settings.weights_seconds, clear=True)

    def _task(self, request: GenerationRequest) -> Task:
        number, turn = self._place(request)
        trajectory = self._trajectories[number]
        size = self._settings.engine.block_tokens
        prompt = len(request.token_ids)
        first = turn == 0
        # All whole blocks of the turn before, whose last token has no keys and values; of a group's first prompt all
        # but the first one's.
        known = trajectory.prompt
        if not first:
            before = trajectory.turns[turn - 1]
            known = prompt - before.observed - min(1, before.generated)
        possible = 0 if first and trajectory.group not in self._begun_groups else min(known, prompt - 1) // size * size
        return Task(
            trajectory=number,
            group=trajectory.group,
            common=trajectory.prompt if len(self._groups[trajectory.group]) > 1 else 0,
            generated=trajectory.turns[turn].generated,
            first=first,
            possible=possible,
        )

    def _place(self, request: GenerationRequest) -> tuple[int, int]:
        """Number of the trajectory of a request, and of its turn from 0."""
        group, sample, _, turn, _ = request.request_id.split("-")
        return self._numbers[int(group), int(sample)], int(turn) - 1

    def asked(self, request: GenerationRequest) -> None:
        """Count a request that the loop has made."""
        self._asked[request.session_id] = asyncio.get_running_loop().time()
        task = self._task(request)
        self._possible += task.possible
        self._begun_groups.add(task.group)
        self._wait(request, unbegun=-1 if task.first else 0)

    def sent(self, request: GenerationRequest) -> None:
        """See `RequestWatcher`."""
        # Sent again after a failure, it has been counted.
        if (asked := self._asked.pop(request.session_id, None)) is not None:
            self._waits.router.append(asyncio.get_running_loop().time() - asked)
        self.answered(request)

    def returned(self, request: GenerationRequest) -> None:
        """See `RequestWatcher`."""
        self._wait(request)

    def answered(self, request: GenerationRequest) -> None:
        """Count a request that does not wait in its worker, or not any more."""
        if request.session_id in self._waiting:
            self._waiting.discard(request.session_id)
            self._ledger.count(asyncio.get_running_loop().time(), waiting=-1)

    def _wait(self, request: GenerationRequest, *, unbegun: int = 0) -> None:
        self._waiting.add(request.session_id)
        self._ledger.count(asyncio.get_running_loop().time(), waiting=1, unbegun=unbegun)


class _WatchedPolicy:
    """The real router, with the times at which the loop asks it."""

    def __init__(self, router: RoutedPolicy, watcher: _Replay) -> None:
        self._router = router
        self._watcher = watcher

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self._watcher.asked(request)
        try:
            return await self._router.generate(request)
        finally:
            # It may have failed in its worker.
            self._watcher.answered(request)

    def end_session(self, session_id: str) -> None:
        self._router.end_session(session_id)


class _MoveCounter(RoutingMetrics):
    def __init__(self, moved: Callable[[], None]) -> None:
        super().__init__("replay")
        self._moved = moved

    def record_move(self, cause: str) -> None:
        super().record_move(cause)
        self._moved()


class _NoExecutor:
    """Executor of an environment that is not called."""

    parallel = None
    batched = False
    timeout = math.inf

    async def hooks(self) -> Hooks:
        return NO_HOOKS

    async def run(self, batch: Batch[Any]) -> NoReturn:
        raise NotImplementedError(f"a trace answers no {type(batch).__name__}")

    def instances(self) -> Sequence[Executor]:
        return (self,)

    async def close(self) -> None:
        """Do nothing."""


class _RecordedEnvironment(EnvironmentRunner):
    """Takes as long as it took when the trace was made; an observation's text is its number of tokens.

    It steps without batches, threads and checks, which are no part of a replay.
    """

    def __init__(self, trajectories: Sequence[TraceTrajectory], ledger: IdleLedger) -> None:
        super().__init__(_NoExecutor(), max_batch=1)
        self._trajectories = trajectories
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()

    async def step(
        self, log: list[ChatMessage], metadata: Metadata, *, episode: str | None = None, hung: bool = False
    ) -> StepOutcome:
        """See `EnvironmentRunner`."""
        del log, episode, hung
        assert metadata is not None
        number, step = metadata["trajectory"], metadata["turn"]
        turns = self._trajectories[number].turns
        turn = turns[step]
        self._ledger.count(self._loop.time(), stepping=1)
        try:
            await asyncio.sleep(turn.environment_seconds)
        finally:
            self._ledger.count(self._loop.time(), stepping=-1)
        return StepOutcome(
            role="environment",
            content=str(turn.observed) if turn.observed else "",
            metadata={"trajectory": number, "turn": step + 1},
            stop_strings=None,
            reward=0.0,
            terminated=step + 1 == len(turns),
        )


class _CountTokenizer:
    """Reads a text as a number of tokens, all of which are 0."""

    vocabulary = None

    def encode(self, text: str) -> array[int]:
        return tokens_of_length(int(text)) if text else token_array()

    def decode(self, ids: Sequence[int]) -> str:
        return str(len(ids))

    decode_with_special_tokens = decode

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> array[int]:
        raise NotImplementedError("a trace has no texts")
