"""The work of a worker: its shards, from their rows to their stored trajectories."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from kuberoll_workers.data.provenance import model_commit, rendering_of
from kuberoll_workers.data.record import FailureRecord
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.dataset.expansion import Lacking, sample_groups
from kuberoll_workers.dataset.inputs import prompt_groups, repeats_of
from kuberoll_workers.environments.served_models import endpoint_variables
from kuberoll_workers.output.part_feed import PartFeed
from kuberoll_workers.output.plan_follower import PaceReport, PlanFollower
from kuberoll_workers.output.storage import open_storage
from kuberoll_workers.output.store import ResultStore
from kuberoll_workers.policy.interface import Policy
from kuberoll_workers.policy.outage import RemotePolicy
from kuberoll_workers.policy.readiness import OutageLimit, while_answering
from kuberoll_workers.rollouts.admission import Drain, SampleAdmission
from kuberoll_workers.rollouts.failure_log import FailureLog
from kuberoll_workers.rollouts.groups import Result
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.scheduling import TrajectoriesMissing, run_groups
from kuberoll_workers.rollouts.seeds import job_seed
from kuberoll_workers.rollouts.settings import RolloutSettings
from kuberoll_workers.serving.engines.interface import Engine
from kuberoll_workers.serving.engines.registry import engine_kind
from kuberoll_workers.telemetry import RolloutMetrics, TrajectoryCounts
from kuberoll_workers.telemetry.idle import AdmissionState
from kuberoll_workers.worker.config import Progress, WorkerConfig
from kuberoll_workers.worker.environments import (
    environments_policy,
    isolated_environment_factory,
    local_paths,
    open_environments,
    players_of,
)
from kuberoll_workers.worker.settings import (
    count_abandoned,
    group_policy,
    job_tokenizer,
    observation_template,
    only_shard,
    pace_of,
    part_limits,
    rollout_settings,
)
from kuberoll_workers.worker.shard_locks import hold_shards

_log = logging.getLogger(__name__)


@asynccontextmanager
async def open_policy(
    config: WorkerConfig, metrics: RolloutMetrics, tokenizer: HuggingFaceTokenizer
) -> AsyncIterator[Policy]:
    """Open the config's policy: a simulated engine, or all replicas of the endpoint.

    Raises:
        ValueError: The config lacks the address for its kind of discovery, or the API key is not set.
    """
    if config.simulated is not None:
        engine = engine_kind(config.simulated.engine).make(config.simulated)
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
        commit=model_commit(config.sources),
    ) as policy:
        yield policy


def serve_version(policy: Policy) -> Callable[[int], Awaitable[None]] | None:
    """How a worker has its own engine serve what a trainer says is published; None: it has no engine of its own."""
    if not isinstance(policy, Engine):
        return None
    return lambda version: policy.load_weights(None, str(version))


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
    lock_report: Callable[[str | None], None] = lambda _waiting: None,
    feed: PartFeed | None = None,
) -> bool:
    """Run the config's shards until they are done or drained.

    What an outage left unscored is tried once more at the end, unless a trainer holds the run back: its groups do not
    wait so long.

    Args:
        progress: Updated as trajectories are stored.
        policy: Used instead of the endpoint.
        tokenizer: The config's tokenizer, if it is already loaded.
        failures: Log of failures, if the caller wants to read it.
        trouble: As in `readiness.OutageLimit`, for the policy.
        pace_report: Called whenever who waits for whom has changed: the worker for the run's trainer, or that for it.
        lock_report: As `waiting` of `shard_locks.hold_shards`.
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
        tokenizer = await asyncio.to_thread(
            HuggingFaceTokenizer.load, config.tokenizer, revision=config.tokenizer_revision
        )
    play = functools.partial(
        play_shards,
        config,
        metrics=metrics,
        drain=drain,
        progress=progress,
        policy=policy,
        tokenizer=job_tokenizer(job, tokenizer, clock=config.clock),
        failures=failures or FailureLog(),
        trouble=trouble,
        pace_report=pace_report,
        lock_report=lock_report,
        feed=feed,
    )
    done = await play()
    if done and progress.outages and pace_of(job) is None:
        _log.info("%d trajectories could not be scored: they are scored again", progress.outages)
        done = await play(lacking="score by an outage")
    return done


async def play_shards(
    config: WorkerConfig,
    *,
    metrics: RolloutMetrics,
    drain: Drain,
    progress: Progress,
    policy: Policy | None,
    tokenizer: HuggingFaceTokenizer,
    failures: FailureLog,
    trouble: Callable[[str | None, float], None] = lambda _reason, _seconds: None,
    pace_report: Callable[[PaceReport], None] = lambda _report: None,
    lock_report: Callable[[str | None], None] = lambda _waiting: None,
    feed: PartFeed | None = None,
    lacking: Lacking = "anything",
    stores: Callable[[Result], bool] = lambda _result: True,
) -> bool:
    """Play what a run's shards lack, once; see `run_worker`.

    Args:
        tokenizer: With the job's chat template.
        lacking: What trajectories lack that are played; of groups that wait for all of theirs, those that are
            complete with them.
        stores: False for a result that is not to be stored.
    """
    job = config.job
    base_seed = job_seed(job.metadata.name, job.spec.generation.sampling.seed)
    async with AsyncExitStack() as stack:
        # The last results are stored when the store is closed.
        stack.callback(metrics.flush)
        storage = open_storage(config.output, parts=part_limits(job))
        # Released after the store is closed, so that a shard never has two writers.
        stack.callback(storage.release_shards)
        if not await hold_shards(
            storage, config.shards, patience=config.lock_patience, drain=drain, waiting=lock_report
        ):
            return False
        durable = 0

        def count(result: Result) -> None:
            nonlocal durable
            durable += 1
            if lacking != "anything":
                progress.forget_outage()
            progress.add(result)

        store = ResultStore(
            storage,
            shards=config.shards,
            shard_count=config.shard_count,
            repeats=repeats_of(job),
            turns=None if config.turns is None else Path(config.turns),
            seconds=metrics.journal_seconds,
            stored=count,
            tasks=config.tasks,
            rollouts=config.rollouts,
            feed=feed,
            oversample=job.spec.rollout.groups.oversample,
        )
        stack.push_async_callback(store.close)
        # Of earlier processes.
        stored = len(store.state.stored) - progress.trajectories
        filtered = len(store.state.filtered) - progress.filtered
        progress.resumed = stored + filtered
        metrics.read_counts = lambda: TrajectoryCounts(
            planned=config.planned,
            stored=stored + progress.trajectories,
            abandoned=count_abandoned(job, failed=progress.failed, filtered=filtered + progress.filtered),
        )
        for spec in job.spec.environments:
            metrics.environment(spec.name).set_step_timeout(spec.call_seconds)
        rows_of = isolated_environment_factory(job, protected=local_paths(config.output, config.turns))
        pace = pace_of(job) if lacking == "anything" else None
        policy_of_groups = group_policy(config, store.state)
        groups = sample_groups(
            prompt_groups(job, base=Path(config.base), environment=rows_of, blocks=config.blocks),
            tokenizer=tokenizer,
            shards=config.shards,
            shard_count=config.shard_count,
            done=store.state,
            seed=base_seed,
            episode_seed=base_seed,
            ordered=pace is not None,
            lacking=lacking,
            whole=policy_of_groups.defers_results,
        )
        stack.enter_context(endpoint_variables(environments_policy(config), config.services))
        environments = await stack.enter_async_context(
            open_environments(
                job, protected=local_paths(config.output, config.turns), output=config.output, metrics=metrics
            )
        )
        serve = None
        if policy is None:
            policy = await stack.enter_async_context(open_policy(config, metrics, tokenizer))
            serve = serve_version(policy)
        settings = rollout_settings(
            job,
            config.max_model_len,
            rendering=rendering_of(config.sources, clock=config.clock),
            usual=config.sampling,
        )
        rollout = Rollout(
            policy=policy,
            environments=environments,
            tokenizer=tokenizer,
            settings=settings,
            metrics=metrics,
            observations=observation_template(job, tokenizer),
            turn_sink=store.turn if store.logs else None,
            players=players_of(job),
        )
        results = 0

        async def sink(result: Result) -> None:
            nonlocal results
            if not stores(result):
                return
            results += 1
            if isinstance(result, FailureRecord):
                failures.log(result)
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
                serve=serve,
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
            policy=policy_of_groups,
            drain=drain,
            pace=pace,
            admitted=admitted,
        )
        await _unless_gone(policy, settings, work, trouble)
    _check_stored(results, durable, progress)
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


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine without end beside the body, which ends with it if it fails.

    Raises:
        Exception: The coroutine has failed.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work)
            yield
            task.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from (errors if len(errors.exceptions) > 1 else None)


def _check_stored(results: int, stored: int, progress: Progress) -> None:
    """Check that all results are stored, after the store is closed.

    Raises:
        TrajectoriesMissing: Some are not; the message has the counts.
    """
    if stored != results:
        raise TrajectoriesMissing(
            f"{results} trajectories ended, but only {stored} of them are stored: {progress.trajectories} finished, "
            f"{progress.failed} failed, {progress.dropped} dropped; resume the run to repeat the others"
        )
