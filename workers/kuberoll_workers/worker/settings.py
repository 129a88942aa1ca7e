"""Settings of the loop, the tokenizer and the output, as a worker's job asks for them."""

from __future__ import annotations

from datetime import datetime

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.chat_observations import ChatTemplateObservations
from kuberoll_workers.data.observations import ObservationTemplate, RawObservations
from kuberoll_workers.data.sampling import Distribution
from kuberoll_workers.data.shards import share
from kuberoll_workers.data.tokenization import TemplateRefused
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.dataset.inputs import repeats_of
from kuberoll_workers.dataset.rows import DatasetError
from kuberoll_workers.output.part_journal import PartLimits
from kuberoll_workers.output.run_state import RunState
from kuberoll_workers.rollouts.groups import GroupPolicy, rewards_differ
from kuberoll_workers.rollouts.pace import Pace
from kuberoll_workers.rollouts.settings import RetryPolicy, RolloutSettings, job_sampling
from kuberoll_workers.worker.config import WorkerConfig


def rollout_settings(
    job: RolloutJob, max_model_len: int, *, rendering: bytes = b"", usual: Distribution | None = None
) -> RolloutSettings:
    """The loop's settings for a job.

    Args:
        max_model_len: The engine's window, which limits `maxSequenceLength`.
        rendering, usual: As in `RolloutSettings`.
    """
    rollout, generation = job.spec.rollout, job.spec.generation
    return RolloutSettings(
        max_turns=rollout.max_turns,
        max_sequence_length=min(rollout.max_sequence_length or max_model_len, max_model_len),
        concurrency=rollout.concurrency,
        scheduling=rollout.scheduling,
        sampling=job_sampling(generation.sampling),
        retries=RetryPolicy(
            generation_attempts=rollout.retries.generation_attempts,
            environment_attempts=rollout.retries.environment_attempts,
            backoff_seconds=rollout.retries.backoff_seconds,
        ),
        generation_seconds=rollout.timeouts.generation_seconds,
        turn_seconds=rollout.timeouts.turn_seconds,
        trajectory_seconds=rollout.timeouts.trajectory_seconds,
        rendering=rendering,
        usual=usual,
        engine_parses_calls=generation.tool_call_parser is not None and generation.engine == "VLLM",
    )


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
    return PartLimits(max_seconds=job.spec.output.parts.max_seconds)


def job_tokenizer(
    job: RolloutJob, tokenizer: HuggingFaceTokenizer, *, clock: str | None = None
) -> HuggingFaceTokenizer:
    """A model's tokenizer that renders chats as the job wants it: by its template, and with its variables.

    Args:
        clock: ISO time that its template reads instead of the present one; None: the present one.

    Raises:
        TemplateRefused: One of them cannot be used; the message names its field.
    """
    model = job.spec.generation.model
    made = tokenizer.with_template(model.chat_template).with_variables(model.chat_template_kwargs)
    if clock is not None:
        made = made.with_clock(datetime.fromisoformat(clock))
    # With the variables: templates may need them.
    made.check_rendering()
    return made


def check_tools(job: RolloutJob, tokenizer: str, declared: str | None) -> None:
    """Check that the chat template renders tools, if somebody declares any.

    Args:
        tokenizer: Directory or hub id.
        declared: Who declares tools, for the message; None: nobody does.

    Raises:
        TemplateRefused: It leaves them out.
    """
    if declared is None:
        return
    try:
        job_tokenizer(job, HuggingFaceTokenizer.load(tokenizer)).check_tools()
    except TemplateRefused as error:
        raise TemplateRefused(f"{declared}: {error}") from None


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
