"""One environment worker: runs some shards of a job against a policy endpoint.

A child process of `kuberoll run` is `python -m kuberoll_workers.worker`; a pod of the cluster (`pods.worker`) does the
same work. It reads two lines of JSON from standard input: a WorkerStart, with which it initializes while the engine
starts, and a WorkerConfig, with which it begins. Progress goes to standard output, one JSON object per line, the last
one with `"done": true`, or one with a `"problem"` if it cannot continue. `"waiting"` says why the policy does not
answer (null: it does again), with the `"seconds"` of `OutageLimit.trouble`; `"held"` and `"starved"` say who waits for
whom, as a `PaceReport`; `"direct"` says where it serves the direct path. Logs go to standard error. SIGTERM drains:
no new trajectories are started, and those in flight are finished and stored.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import importlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO

import msgspec
from pydantic import TypeAdapter

from kuberoll_api.contract import ServeArgs
from kuberoll_api.model.environments import Environment
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.policy_access import POLICY_VARIABLES
from kuberoll_workers.data.lifetime import end_with_parent, watch_parent
from kuberoll_workers.data.observations import (
    ChatTemplateObservations,
    ObservationTemplate,
    RawObservations,
)
from kuberoll_workers.data.record import WHOLE_GROUP, DroppedRecord, FailureRecord, RecordError
from kuberoll_workers.data.shards import share
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer, TemplateRefused
from kuberoll_workers.data.tracebacks import with_frames
from kuberoll_workers.dataset.expansion import sample_groups
from kuberoll_workers.dataset.inputs import prompt_groups, repeats_of
from kuberoll_workers.dataset.rows import DatasetError
from kuberoll_workers.environments import registry
from kuberoll_workers.environments.interface import EnvironmentInterface
from kuberoll_workers.environments.isolation import Servers, make_executor
from kuberoll_workers.environments.processes import ProcessEnvironment
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.environments.sandbox import Sandbox
from kuberoll_workers.environments.served_models import ServedModel, endpoint_variables, service_variables
from kuberoll_workers.output.part_feed import PartFeed
from kuberoll_workers.output.part_journal import PartLimits
from kuberoll_workers.output.plan_follower import PaceReport, PlanFollower
from kuberoll_workers.output.run_state import RunState
from kuberoll_workers.output.storage import StorageError, open_storage
from kuberoll_workers.output.store import ResultStore
from kuberoll_workers.policy.interface import Policy, PolicyUnavailable, SamplingParameters
from kuberoll_workers.policy.outage import RemotePolicy
from kuberoll_workers.policy.readiness import OutageLimit, answering_text, waiting_text, while_answering
from kuberoll_workers.rollouts.admission import Drain, SampleAdmission
from kuberoll_workers.rollouts.agents import AgentSettings
from kuberoll_workers.rollouts.failure_log import FailureLog
from kuberoll_workers.rollouts.groups import GroupPolicy, Result, rewards_differ
from kuberoll_workers.rollouts.pace import Pace
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.scheduling import TrajectoriesMissing, run_groups
from kuberoll_workers.rollouts.seeds import job_seed
from kuberoll_workers.rollouts.settings import RetryPolicy, RolloutSettings, sampling_of
from kuberoll_workers.serving.engines.simulated import Simulated
from kuberoll_workers.telemetry import Activity, RolloutMetrics, TrajectoryCounts
from kuberoll_workers.telemetry.idle import AdmissionState

if TYPE_CHECKING:
    from kuberoll_workers.environments.remote.proxy import RemoteEnvironment

REPORT_SECONDS = 0.25
# Servers in a cluster are started together with the first pod that asks for them.
_START_PATIENCE = 300.0
_METRICS_PATIENCE = 30.0

_log = logging.getLogger(__name__)


class WorkerStart(msgspec.Struct, kw_only=True, frozen=True):
    """What a worker can begin with before there is an engine.

    Attributes:
        tokenizer: Directory or hub id of the tokenizer.
        log: File to which standard error is appended from now on.
        endpoint: True if it will generate at an endpoint, and not simulate its engine.
    """

    tokenizer: str
    log: str
    endpoint: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration of a worker.

    Attributes:
        base: The directory where the job's relative paths start.
        tokenizer: Directory or hub id of the tokenizer.
        endpoint: Base URL of the policy; None: see `simulated`.
        max_model_len: The engine's window, tokens.
        output: The run's directory, which must exist, or URI.
        turns: Directory of the turn log; None: turns are not journaled.
        shards: The shards to run, out of `shard_count`.
        tasks, rollouts: Number of tasks of the dataset, and of samples of the largest one; None: unknown.
        blocks: Digests of the dataset's rows, see `inputs.InputSummary`; None: rows are not checked.
        planned: Number of trajectories of this worker, for the metrics; None: unknown.
        token: Bearer token for the policy; None: none.
        discovery: Source of the list of replicas: the endpoint, DNS, or `replicas`.
        replicas: Base URLs of the replicas, with discovery `Static`.
        replicas_host: `host:port` whose addresses are the replicas, with discovery `DNS`.
        simulated: Arguments of an engine that this worker simulates instead of using an endpoint.
        services: Endpoints of the job's services, by name, of those that are not in this process's variables.
        direct_token: Bearer token of consumers on the direct path; None: there is none.
    """

    job: RolloutJob
    base: str
    tokenizer: str
    endpoint: str | None
    max_model_len: int
    output: str
    turns: str | None
    shards: list[int]
    shard_count: int
    tasks: int | None = None
    rollouts: int | None = None
    blocks: list[str] | None = None
    planned: int | None = None
    token: str | None = None
    discovery: Literal["Endpoint", "DNS", "Static"] = "Endpoint"
    replicas: list[str] = field(default_factory=list)
    replicas_host: str | None = None
    simulated: ServeArgs | None = None
    services: dict[str, ServedModel] = field(default_factory=dict)
    direct_token: str | None = None

    def encode(self) -> bytes:
        """The configuration as one line of JSON."""
        return _CONFIG.dump_json(self, by_alias=True, exclude_unset=True)

    @classmethod
    def decode(cls, line: bytes) -> WorkerConfig:
        """Decode the output of `encode`, and validate the job."""
        return _CONFIG.validate_json(line)


_CONFIG: Final = TypeAdapter(WorkerConfig)


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counts of one worker since it started; trajectories stored earlier are counted in `resumed` only.

    Attributes:
        dropped: Dropped trajectories, `filtered` of them with their whole group: filtered out, or too old.
        generating, stepping: Trajectories that wait for generation, or for an environment, now.
        ended_turns, received_tokens: Turns and generated tokens, with those of unfinished trajectories.
        done: The worker has ended in good order.
        complete: Its shards have nothing left to do.
    """

    resumed: int = 0
    trajectories: int = 0
    failed: int = 0
    dropped: int = 0
    filtered: int = 0
    turns: int = 0
    generated_tokens: int = 0
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0
    reward_sum: float = 0.0
    generating: int = 0
    stepping: int = 0
    ended_turns: int = 0
    received_tokens: int = 0
    done: bool = False
    complete: bool = False

    @property
    def results(self) -> int:
        """Number of stored results of all kinds."""
        return self.trajectories + self.failed + self.dropped

    def update(self, activity: Activity) -> None:
        """Take over the counts of the present work."""
        self.generating, self.stepping = activity.generating, activity.stepping
        self.ended_turns, self.received_tokens = activity.turns, activity.tokens

    def add(self, result: Result) -> None:
        """Count a stored trajectory."""
        if isinstance(result, FailureRecord):
            self.failed += 1
            return
        if isinstance(result, DroppedRecord):
            self.dropped += 1
            self.filtered += result.reason in WHOLE_GROUP
            return
        self.trajectories += 1
        self.turns += result.turn_count
        self.generated_tokens += result.tokens.generated
        self.generation_seconds += sum(result.timing.generation_seconds)
        self.environment_seconds += sum(result.timing.environment_seconds)
        self.reward_sum += result.total_reward


def environment_factory(job: RolloutJob) -> Callable[[str], EnvironmentInterface]:
    """A function that creates the job's environments by name."""
    specs = {spec.name: spec for spec in job.spec.environments}
    return lambda name: environment_of(specs[name])


def environment_of(spec: Environment) -> EnvironmentInterface:
    """An environment for its own metrics, in this process; one on servers elsewhere computes them there.

    Raises:
        UnusableEnvironment: It cannot be created, or no server answers.
    """
    if is_elsewhere(spec):
        return _on_servers(spec, patience=_METRICS_PATIENCE)
    return registry.create(spec)


def is_elsewhere(spec: Environment) -> bool:
    """True if the environment is on servers that this process does not start."""
    return spec.remote is not None and bool(spec.remote.located)


def servers_of(spec: Environment, *, scope: str = "") -> Servers | None:
    """The servers of an environment that are elsewhere; None if there are none.

    Args:
        scope: As in `Servers`.
    """
    if spec.remote is None or not spec.remote.located:
        return None
    variable = spec.remote.api_key_variable
    return Servers(
        urls=spec.remote.located, token=None if variable is None else os.environ.get(variable) or None, scope=scope
    )


def _on_servers(spec: Environment, *, patience: float) -> RemoteEnvironment:
    # An HTTP client is a large part of what a worker imports, and most jobs need none.
    from kuberoll_workers.environments.remote.proxy import RemoteEnvironment

    servers = servers_of(spec)
    assert servers is not None
    return RemoteEnvironment(spec.name, servers.urls, token=servers.token, patience=patience)


def remote_digests(job: RolloutJob) -> dict[str, str | None]:
    """Digests of the code of environments that are on servers elsewhere, by name.

    Raises:
        UnusableEnvironment: No server of one answers.
    """
    return {
        spec.name: _on_servers(spec, patience=_METRICS_PATIENCE).info.digest
        for spec in job.spec.environments
        if is_elsewhere(spec)
    }


def isolated_environment_factory(job: RolloutJob, *, protected: Sequence[str]) -> Callable[[str], EnvironmentInterface]:
    """A function that gives the job's environments by name, to read their rows.

    Those with isolation Process, and with isolation Remote without a url, run in processes of their own: none of their
    code runs in this one. Others with isolation Remote are asked of their servers.

    Args:
        protected: As in `open_environments`.
    """
    specs = {spec.name: spec for spec in job.spec.environments}

    def make(name: str) -> EnvironmentInterface:
        spec = specs[name]
        if is_elsewhere(spec):
            return _on_servers(spec, patience=_START_PATIENCE)
        if spec.isolation != "Inline":
            return ProcessEnvironment(registry.PlainSpec.of(spec), sandbox_of(spec, protected=protected))
        return registry.create(spec)

    return make


def check_environment(job: RolloutJob, name: str, *, protected: Sequence[str]) -> None:
    """Check that an environment of a job can be created, where it will run.

    Args:
        protected: As in `open_environments`.

    Raises:
        UnusableEnvironment: It cannot, or no server of it answers.
    """
    made = isolated_environment_factory(job, protected=protected)(name)
    if isinstance(made, ProcessEnvironment):
        made.check()


def environments_policy(config: WorkerConfig) -> ServedModel | None:
    """The policy's endpoint for the environments that use it; None: none does.

    Raises:
        UnusableEnvironment: The policy has no endpoint, or its API key is not set.
    """
    users = [spec.name for spec in config.job.spec.environments if spec.uses_policy]
    if not users:
        return None
    external = config.job.spec.generation.external
    url = config.endpoint or (None if external is None else external.url)
    if not url:
        raise UnusableEnvironment(
            f"environment {users[0]!r}: it uses the policy's endpoint, but this worker simulates the engine itself"
        )
    variable = None if external is None else external.api_key_variable
    return ServedModel(url=url, token=config.token if variable is None else os.environ.get(variable))


def rollout_settings(job: RolloutJob, max_model_len: int) -> RolloutSettings:
    """The loop's settings for a job.

    Args:
        max_model_len: The engine's window, which limits `maxSequenceLength`.
    """
    rollout, generation = job.spec.rollout, job.spec.generation
    sampling = generation.sampling
    # Each sample has its own seed.
    given = sampling.model_dump(by_alias=False, exclude={"seed", "override", "structured_outputs"})
    if sampling.structured_outputs is not None:
        given["structured_outputs"] = sampling.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    return RolloutSettings(
        max_turns=rollout.max_turns,
        max_sequence_length=min(rollout.max_sequence_length or max_model_len, max_model_len),
        concurrency=rollout.concurrency,
        scheduling=rollout.scheduling,
        sampling=sampling_of(SamplingParameters(max_tokens=sampling.max_tokens), given),
        retries=RetryPolicy(
            generation_attempts=rollout.retries.generation_attempts,
            environment_attempts=rollout.retries.environment_attempts,
            backoff_seconds=rollout.retries.backoff_seconds,
            max_backoff_seconds=rollout.retries.max_backoff_seconds,
        ),
        generation_seconds=rollout.timeouts.generation_seconds,
        turn_seconds=rollout.timeouts.turn_seconds,
        trajectory_seconds=rollout.timeouts.trajectory_seconds,
        engine_parses_calls=generation.tool_call_parser is not None and generation.engine == "VLLM",
    )


def sandbox_of(spec: Environment, *, protected: Sequence[str]) -> Sandbox:
    """Access rights of the processes of an environment."""
    access = spec.access
    return Sandbox(
        protected=protected,
        readable=access.readable_paths,
        writable=access.writable_paths,
        variables=[
            *access.variables,
            *(POLICY_VARIABLES if spec.uses_policy else ()),
            *service_variables(spec.used_services),
        ],
    )


def local_paths(*places: str | None) -> list[str]:
    """The local directories among a run's locations, which environments must not see."""
    return [place.removeprefix("file://") for place in places if place and "://" not in place.removeprefix("file://")]


@asynccontextmanager
async def open_environments(
    job: RolloutJob, *, protected: Sequence[str] = (), output: str = ""
) -> AsyncIterator[dict[str, EnvironmentRunner]]:
    """Open the job's environments by name; they are closed at the end.

    Args:
        protected: Files and directories that processes of environments never reach.
        output: The run's directory or URI, to tell its episodes from those of other runs on the same servers.
    """
    scope = hashlib.blake2b(f"{job.metadata.name}\n{output}".encode(), digest_size=6).hexdigest()
    async with AsyncExitStack() as stack:
        runners = {}
        for spec in job.spec.environments:
            executor = make_executor(
                registry.PlainSpec.of(spec),
                isolation=spec.isolation,
                processes=spec.processes,
                spare=spec.call_spares,
                timeout=spec.call_seconds,
                sandbox=sandbox_of(spec, protected=protected),
                servers=servers_of(spec, scope=scope),
            )
            runners[spec.name] = EnvironmentRunner(executor, max_batch=spec.call_size)
            stack.push_async_callback(runners[spec.name].close)
        yield runners


@asynccontextmanager
async def open_policy(
    config: WorkerConfig, metrics: RolloutMetrics, tokenizer: HuggingFaceTokenizer
) -> AsyncIterator[Policy]:
    """Open the config's policy: a simulated engine, or all replicas of the endpoint.

    Raises:
        ValueError: The config lacks the address for its kind of discovery, or the API key is not set.
    """
    if config.simulated is not None:
        engine = Simulated.of(config.simulated)
        await engine.start()
        if (weights := config.simulated.weights) is not None:
            await engine.load_weights(weights.uri, weights.version)
        yield engine
        return
    # HTTP clients are a fifth of what a worker imports, and a simulation needs none.
    from kuberoll_workers.policy.endpoints import open_endpoints

    async with open_endpoints(
        config.job,
        endpoint=config.endpoint,
        token=config.token,
        discovery=config.discovery,
        replicas=config.replicas,
        replicas_host=config.replicas_host,
        window=config.max_model_len,
        tokenizer=tokenizer,
        metrics=metrics.routing,
    ) as policy:
        yield policy


async def run_worker(
    config: WorkerConfig,
    *,
    metrics: RolloutMetrics,
    drain: Drain,
    progress: Progress,
    policy: Policy | None = None,
    tokenizer: HuggingFaceTokenizer | None = None,
    failures: FailureLog | None = None,
    trouble: Callable[[str | None, float], None] = lambda _reason, _seconds: None,
    pace_report: Callable[[PaceReport], None] = lambda _report: None,
    feed: PartFeed | None = None,
) -> bool:
    """Run the config's shards until they are done or drained.

    Args:
        progress: Updated as trajectories are stored.
        policy: Used instead of the endpoint.
        tokenizer: The config's tokenizer, if it is already loaded.
        failures: Log of failures, if the caller wants to read it.
        trouble: As in `readiness.OutageLimit`, for the policy.
        pace_report: Called whenever who waits for whom has changed: the worker for the run's trainer, or that for it.
        feed: Takes what is written to an object store, for consumers on the direct path.

    Returns:
        True if the shards are done; False if drained first.

    Raises:
        DatasetError, TemplateRefused, RecordError, StorageError, OSError: The inputs or the output cannot be used.
        TrajectoriesMissing: Some trajectories are not stored.
        PolicyUnavailable: The policy has not answered for too long.
    """
    job = config.job
    if tokenizer is None:
        tokenizer = await asyncio.to_thread(HuggingFaceTokenizer.load, config.tokenizer)
    tokenizer = job_tokenizer(job, tokenizer)
    seeded = job.spec.dataset.seed_per_repeat
    base_seed = job_seed(job.metadata.name, job.spec.generation.sampling.seed)
    async with AsyncExitStack() as stack:
        # The last results are stored when the store is closed.
        stack.callback(metrics.flush)
        storage = open_storage(config.output, parts=part_limits(job))
        # Released after the store is closed, so that a shard never has two writers.
        await asyncio.to_thread(storage.hold_shards, config.shards)
        stack.callback(storage.release_shards)
        store = ResultStore(
            storage,
            shards=config.shards,
            shard_count=config.shard_count,
            repeats=repeats_of(job),
            turns=None if config.turns is None else Path(config.turns),
            seconds=metrics.journal_seconds,
            stored=progress.add,
            tasks=config.tasks,
            rollouts=config.rollouts,
            feed=feed,
            oversample=job.spec.rollout.groups.oversample,
        )
        stack.push_async_callback(store.close)
        stored, filtered = len(store.state.stored), len(store.state.filtered)
        progress.resumed = stored + filtered
        metrics.read_counts = lambda: TrajectoryCounts(
            planned=config.planned,
            stored=stored + progress.trajectories,
            abandoned=count_abandoned(job, failed=progress.failed, filtered=filtered + progress.filtered),
        )
        for spec in job.spec.environments:
            metrics.environment(spec.name).set_step_timeout(spec.call_seconds)
        rows_of = isolated_environment_factory(job, protected=local_paths(config.output, config.turns))
        pace = pace_of(job)
        groups = sample_groups(
            prompt_groups(job, base=Path(config.base), environment=rows_of, blocks=config.blocks),
            tokenizer=tokenizer,
            shards=config.shards,
            shard_count=config.shard_count,
            done=store.state,
            seed=base_seed if seeded else None,
            episode_seed=base_seed,
            ordered=pace is not None,
        )
        stack.enter_context(endpoint_variables(environments_policy(config), config.services))
        environments = await stack.enter_async_context(
            open_environments(job, protected=local_paths(config.output, config.turns), output=config.output)
        )
        if policy is None:
            policy = await stack.enter_async_context(open_policy(config, metrics, tokenizer))
        settings = rollout_settings(job, config.max_model_len)
        rollout = Rollout(
            policy=policy,
            environments=environments,
            tokenizer=tokenizer,
            settings=settings,
            metrics=metrics,
            observations=observation_template(job, tokenizer),
            turn_sink=store.turn if store.logs else None,
            agents={
                spec.name: AgentSettings(seconds=spec.call_seconds, sessions=spec.has_sessions)
                for spec in job.spec.environments
                if spec.agent is not None
            },
        )
        results, before, failure_log = 0, progress.results, failures or FailureLog()

        async def sink(result: Result) -> None:
            nonlocal results
            results += 1
            if isinstance(result, FailureRecord):
                failure_log.log(result)
            await store.result(result)

        follower = None
        if pace is not None:
            held = job.spec.rollout.on_policy is not None
            follower = PlanFollower(
                storage,
                pace,
                shard=only_shard(config),
                shards=config.shard_count,
                held=held,
                metrics=metrics.consumer,
                report=pace_report,
                written=None if feed is None else feed.plan_written,
            )
            await stack.enter_async_context(in_background(follower.follow()))

        def admitted(admission: SampleAdmission) -> None:
            metrics.idle.read_admission = lambda: AdmissionState(admission.held_back, admission.all_begun)
            if follower is not None:
                follower.watch(admission)

        work = run_groups(
            rollout,
            groups,
            sink,
            policy=group_policy(config, store.state),
            drain=drain,
            pace=pace,
            admitted=admitted,
        )
        await _unless_gone(policy, settings, work, trouble)
    _check_stored(results, progress, before=before)
    if drain.is_set():
        return False
    await store.finalize(parquet=job.spec.output.format == "Parquet")
    return True


async def _unless_gone(
    policy: Policy,
    settings: RolloutSettings,
    work: Coroutine[Any, Any, None],
    trouble: Callable[[str | None, float], None],
) -> None:
    if not isinstance(policy, RemotePolicy):
        return await work
    setting = "spec.rollout: retries.generationAttempts times timeouts.generationSeconds"
    limit = OutageLimit(settings.outage_seconds, setting, trouble)
    return await while_answering(policy.outage, limit, work)


def pace_of(job: RolloutJob) -> Pace | None:
    """The pace of a run that its consumer holds back, or can stop; None: there is no such consumer."""
    on_policy = job.spec.rollout.on_policy
    if on_policy is None:
        return Pace(max_lag=None, held=False) if job.spec.dataset.epochs is None else None
    return Pace(max_lag=on_policy.max_lag if on_policy.on_stale == "Drop" else None, held=True)


def only_shard(config: WorkerConfig) -> int:
    """The shard of a worker that is held back: with several, one of them could keep the others waiting.

    Raises:
        DatasetError: It has several.
    """
    if len(config.shards) != 1:
        raise DatasetError(
            f"spec.workers: {config.shard_count} shards for fewer workers: with rollout.onPolicy or dataset.epochs: "
            "null every shard needs a worker of its own; remove shards, or raise replicas"
        )
    return config.shards[0]


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine without end beside the body."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _check_stored(results: int, progress: Progress, *, before: int) -> None:
    """Check that all results are stored, after the store is closed.

    Raises:
        TrajectoriesMissing: Some are not; the message has the counts.
    """
    stored = progress.results - before
    if stored != results:
        raise TrajectoriesMissing(
            f"{results} trajectories ended, but only {stored} of them are stored: {progress.trajectories} finished, "
            f"{progress.failed} failed, {progress.dropped} dropped; resume the run to repeat the others"
        )


def planned_trajectories(job: RolloutJob, trajectories: int | None, *, wanted: int | None) -> int | None:
    """Number of trajectories to finish; a lower bound if groups have different sizes and `wanted` is set.

    Args:
        trajectories: Number of trajectories of the whole dataset; None: it has no end.
        wanted: Number of prompt groups to keep; None: all.

    Returns:
        None if the run has no end of its own.
    """
    if wanted is None:
        return trajectories
    kept = wanted * min(repeats_of(job).values())
    return kept if trajectories is None else min(trajectories, kept)


def count_abandoned(job: RolloutJob, *, failed: int, filtered: int) -> int:
    """Number of planned trajectories that will not be stored.

    With `groups.wanted`, a group that is dropped or fails as a whole is replaced by the next one of the dataset.

    Args:
        failed, filtered: Trajectories that failed permanently, and those of groups that were filtered out.
    """
    groups = job.spec.rollout.groups
    if groups.wanted is None:
        return failed + filtered
    return 0 if groups.atomic else failed


def part_limits(job: RolloutJob) -> PartLimits:
    """Limits of the parts in which journals are written to an object store."""
    parts = job.spec.output.parts
    return PartLimits(max_bytes=parts.max_bytes, max_seconds=parts.max_seconds)


def job_tokenizer(job: RolloutJob, tokenizer: HuggingFaceTokenizer) -> HuggingFaceTokenizer:
    """A model's tokenizer that renders chats as the job wants it: by its template, and with its variables.

    Raises:
        TemplateRefused: One of them cannot be used; the message names its field.
    """
    model = job.spec.generation.model
    made = tokenizer.with_template(model.chat_template).with_variables(model.chat_template_kwargs)
    # With the variables: templates may need them.
    made.check_rendering()
    return made


def observation_template(job: RolloutJob, tokenizer: HuggingFaceTokenizer) -> ObservationTemplate:
    """The template that converts the job's observations into tokens.

    Raises:
        TemplateRefused: The model's chat template cannot be used for it.
    """
    if job.spec.rollout.observation_template == "ChatTemplate":
        return ChatTemplateObservations(tokenizer)
    return RawObservations(tokenizer)


def group_policy(config: WorkerConfig, state: RunState) -> GroupPolicy:
    """The group policy for this worker: its share of the job's, less what is stored."""
    groups = config.job.spec.rollout.groups
    wanted, budget = (
        None if total is None else max(0, sum(share(total, n, config.shard_count) for n in config.shards) - done)
        for total, done in ((groups.wanted, state.groups_kept), (groups.drop_budget, state.groups_filtered))
    )
    return GroupPolicy(
        atomic=groups.atomic,
        keep=rewards_differ if groups.drop_equal_rewards else None,
        drop_budget=budget,
        wanted=wanted,
    )


async def _main(config: WorkerConfig, tokenizer: HuggingFaceTokenizer, reports: TextIO) -> str | None:
    """Run the config's shards; return the problem, for the user, that ended them, or None."""
    drain, progress = Drain(), Progress()
    problem: str | None = None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain.set)
    metrics = RolloutMetrics(str(config.job.metadata.name))
    background = [
        asyncio.create_task(metrics.watch_event_loop()),
        asyncio.create_task(_report(progress, metrics, reports)),
    ]

    def trouble(reason: str | None, seconds: float) -> None:
        _log.warning("%s", answering_text(seconds) if reason is None else waiting_text(reason, seconds))
        reports.write(msgspec.json.encode({"waiting": reason, "seconds": seconds}).decode() + "\n")
        reports.flush()

    def pace_report(report: PaceReport) -> None:
        reports.write(msgspec.json.encode(report._asdict()).decode() + "\n")
        reports.flush()

    feed = PartFeed() if config.direct_token is not None else None
    try:
        async with direct_path(feed, config.direct_token, metrics, reports):
            progress.complete = await run_worker(
                config,
                metrics=metrics,
                drain=drain,
                progress=progress,
                tokenizer=tokenizer,
                trouble=trouble,
                pace_report=pace_report,
                feed=feed,
            )
        progress.done = True
    except BaseException as error:
        if (problem := problem_of(error)) is None:
            raise
        reports.write(msgspec.json.encode({"problem": problem}).decode() + "\n")
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
    progress.update(metrics.activity())
    _print(progress, reports)
    return problem


@asynccontextmanager
async def direct_path(
    feed: PartFeed | None, token: str | None, metrics: RolloutMetrics, reports: TextIO
) -> AsyncIterator[None]:
    """Serve a feed to consumers on this machine while the body runs, and report where."""
    if feed is None or token is None:
        yield
        return
    # Only here: its HTTP server takes a moment to import.
    from kuberoll_api.http_server import serving
    from kuberoll_workers.output.feed_server import feed_routes

    async with serving(feed_routes(feed, [token], metrics.direct), host="127.0.0.1", port=0) as port:
        reports.write(msgspec.json.encode({"direct": f"127.0.0.1:{port}"}).decode() + "\n")
        reports.flush()
        try:
            yield
        finally:
            # The server's end waits for those who wait.
            feed.end()


_REFUSALS = (
    DatasetError,
    OSError,
    PolicyUnavailable,
    RecordError,
    StorageError,
    TemplateRefused,
    UnusableEnvironment,
)


def problem_of(error: BaseException) -> str | None:
    """The message for the user about an error that ended a worker; None for a bug, which needs its traceback."""
    if isinstance(error, BaseExceptionGroup):
        # The others follow from the first one.
        return next((words for inner in error.exceptions if (words := problem_of(inner)) is not None), None)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{error}: free some space there; what is stored is kept"
    return with_frames(error) or type(error).__name__ if isinstance(error, _REFUSALS) else None


async def _report(progress: Progress, metrics: RolloutMetrics, reports: TextIO) -> None:
    while True:
        progress.update(metrics.activity())
        _print(progress, reports)
        await asyncio.sleep(REPORT_SECONDS)


def _print(progress: Progress, reports: TextIO) -> None:
    reports.write(msgspec.json.encode(progress).decode() + "\n")
    reports.flush()


def tune_garbage_collector() -> None:
    """Make garbage collection less frequent: a worker has millions of live objects and creates few cycles.

    With 10,000 trajectories in flight a full collection blocks the process for up to 0.4 s (`benchmarks/in_flight.py`),
    and by default follows every 700 surviving new objects.
    """
    gc.collect()
    # Exclude the present objects, mostly code, from further collections.
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


def _log_to(path: str) -> None:
    with Path(path).open("ab") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())


def _own_stdout() -> TextIO:
    """Reserve standard output for reports: prints of environments and libraries go to standard error."""
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return reports


def main() -> None:
    """The process's entry point."""
    parent = os.getppid()
    end_with_parent()
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the parent has ended
    start = msgspec.json.decode(line, type=WorkerStart)
    _log_to(start.log)
    reports = _own_stdout()
    # If PyTorch is installed transformers imports it, which takes seconds; the engine's start takes longer.
    tokenizer = HuggingFaceTokenizer.load(start.tokenizer)
    if start.endpoint:
        # Its HTTP client is imported here, while there is time.
        importlib.import_module("kuberoll_workers.policy.endpoints")
    line = sys.stdin.buffer.readline()
    if not line:
        return
    watch_parent(sys.stdin.fileno(), parent)
    tune_garbage_collector()
    problem = asyncio.run(_main(WorkerConfig.decode(line), tokenizer, reports))
    if problem is not None:
        sys.exit(problem)


if __name__ == "__main__":
    main()
