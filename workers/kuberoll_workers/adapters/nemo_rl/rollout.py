"""Whole rollouts: NeMo RL's `run_multi_turn_rollout`, `run_async_multi_turn_rollout`, and one sample of these."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kuberoll_workers.adapters.nemo_rl.batched_data_dict import batch_class
from kuberoll_workers.adapters.nemo_rl.calls import CallerContext, run_sync
from kuberoll_workers.adapters.nemo_rl.conversion import (
    Result,
    batch_of,
    log_of,
    refuse_unknown_tasks,
    reward_parts_of,
    sample_of,
    samples_of,
)
from kuberoll_workers.adapters.nemo_rl.environments import open_environments
from kuberoll_workers.adapters.nemo_rl.failures import OnFailure, RolloutFailed, distinct_tracebacks, summary_of
from kuberoll_workers.adapters.nemo_rl.limits import RolloutLimits, settings_of
from kuberoll_workers.adapters.nemo_rl.metrics import lengths_of, loggers_take_histograms, metrics_of
from kuberoll_workers.adapters.nemo_rl.policies import BatchPolicy, PolicyAdapter, StreamPolicy
from kuberoll_workers.adapters.nemo_rl.tokenizers import pad_token_of, tokenizer_of
from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import FINISHED
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import RolloutSettings
from kuberoll_workers.rollouts.trajectory import Trajectory
from kuberoll_workers.telemetry import RolloutMetrics

log = logging.getLogger(__name__)


def run_multi_turn_rollout(
    policy_generation: Any,
    input_batch: Any,
    tokenizer: Any,
    task_to_env: Mapping[str, Any],
    max_seq_len: int,
    max_rollout_turns: int | None = 999999,
    greedy: bool = False,
    *,
    on_failure: OnFailure = "mark",
    limits: RolloutLimits | None = None,
    histograms: bool | None = None,
    deduplicate_multimodal_data: bool = False,  # noqa: ARG001 - newer callers pass it; there is only text
) -> tuple[Any, dict[str, Any]]:
    """Roll a batch out turn by turn: one `generate` call for all active samples, then one call for each environment.

    It also works inside a running event loop. The policy is called in its own thread.

    Args:
        policy_generation: Has `generate(batch, greedy=)`.
        input_batch: Columns `message_log`, `extra_env_info`, `task_name`, and optionally `stop_strings`, `idx` and any
            others. It is not changed.
        tokenizer: Called with texts; has `batch_decode` and `pad_token_id`.
        task_to_env: Environments by task name: Ray actor handles, or objects with a plain or coroutine `step`.
        max_seq_len: Maximum number of tokens per trajectory.
        max_rollout_turns: None: no limit of their own.
        on_failure: Handling of samples that failed permanently. `mark`: `total_reward` is NaN, `stop_reason` is
            "failed", `failure` has the reason, also logged. `raise`: RolloutFailed, when all samples have ended.
        histograms: Add the lists of `metrics.metrics_of` to the metrics; None: if NeMo RL is loaded and its loggers
            take them.

    Returns:
        A batch of the input's class that shares no data with it, with the columns of `conversion.batch_of`; and the
        numbers of `summary.summarize` and `metrics.turn_metrics`.

    Raises:
        ValueError: A task has no environment, or a row cannot be used; nothing was called then.
        RolloutFailed: Samples failed, and `on_failure` is "raise".
    """
    caller, pad = CallerContext(), pad_token_of(tokenizer)
    samples = samples_of(input_batch, task_to_env)
    limits = limits or RolloutLimits()
    settings = settings_of(
        limits,
        scheduling="Lockstep",
        batch_size=len(samples),
        max_turns=max_rollout_turns,
        max_sequence_length=max_seq_len,
    )
    policy = BatchPolicy(
        policy_generation, greedy=greedy, pad_token_id=pad, batch_type=batch_class(input_batch), caller=caller
    )
    results = run_sync(lambda: _run(policy, samples, tokenizer, task_to_env, settings, limits), caller)
    return _finish(input_batch, results, policy, on_failure, histograms)


def run_async_multi_turn_rollout(
    policy_generation: Any,
    input_batch: Any,
    tokenizer: Any,
    task_to_env: Mapping[str, Any],
    max_seq_len: int,
    max_rollout_turns: int | None = 999999,
    greedy: bool = False,
    *,
    on_failure: OnFailure = "mark",
    limits: RolloutLimits | None = None,
    histograms: bool | None = None,
    deduplicate_multimodal_data: bool = False,  # noqa: ARG001 - newer callers pass it; there is only text
) -> tuple[Any, dict[str, Any]]:
    """Roll a batch out, each sample at its own pace; arguments and results are those of `run_multi_turn_rollout`.

    The function is synchronous, and also works inside a running event loop.

    Args:
        policy_generation: Has `generate_async(batch, greedy=)`, called with batches of one.

    Raises:
        AssertionError: The policy does not generate asynchronously.
        ValueError: A task has no environment, or a row cannot be used; nothing was called then.
        RolloutFailed: Samples failed, and `on_failure` is "raise".
    """
    policy, results = _run_async(
        *(policy_generation, input_batch, tokenizer, task_to_env, max_seq_len, max_rollout_turns),
        greedy=greedy,
        limits=limits,
    )
    return _finish(input_batch, results, policy, on_failure, histograms)


def _run_async(
    policy_generation: Any,
    input_batch: Any,
    tokenizer: Any,
    task_to_env: Mapping[str, Any],
    max_seq_len: int,
    max_rollout_turns: int | None,
    *,
    greedy: bool,
    limits: RolloutLimits | None,
) -> tuple[StreamPolicy, list[Result]]:
    caller, pad = CallerContext(), pad_token_of(tokenizer)
    samples = samples_of(input_batch, task_to_env)
    limits = limits or RolloutLimits()
    settings = settings_of(
        limits,
        scheduling="Concurrent",
        batch_size=len(samples),
        max_turns=max_rollout_turns,
        max_sequence_length=max_seq_len,
    )
    policy = StreamPolicy(policy_generation, greedy=greedy, pad_token_id=pad, batch_type=batch_class(input_batch))
    return policy, run_sync(lambda: _run(policy, samples, tokenizer, task_to_env, settings, limits), caller)


@dataclass(frozen=True, slots=True)
class RolloutGroupResult:
    """One prompt group's rollouts.

    Attributes:
        group_index: Its place in the batch, from 0.
        final_batch, rollout_metrics: As `run_async_multi_turn_rollout` returns them, of its samples only.
        task_index: None; rows of NeMo Gym have one.
    """

    group_index: int
    final_batch: Any
    rollout_metrics: dict[str, Any]
    task_index: int | None = None


async def run_async_multi_turn_rollout_groups(
    policy_generation: Any,
    input_batch: Any,
    tokenizer: Any,
    task_to_env: Mapping[str, Any],
    max_seq_len: int,
    num_generations: int,
    max_rollout_turns: int | None = 999999,
    greedy: bool = False,
    deduplicate_multimodal_data: bool = False,  # noqa: ARG001 - newer callers pass it; there is only text
    *,
    on_failure: OnFailure = "mark",
    limits: RolloutLimits | None = None,
    histograms: bool | None = None,
) -> AsyncIterator[RolloutGroupResult]:
    """Roll a batch out, each sample at its own pace; when all have ended, yield its prompt groups in order.

    Args:
        input_batch: As in `run_async_multi_turn_rollout`; the samples of a group follow each other.
        num_generations: Number of samples of each group.

    Raises:
        ValueError: `num_generations` is not positive or does not divide the batch, a task has no environment, or a row
            cannot be used; nothing was called then.
        AssertionError, RolloutFailed: As `run_async_multi_turn_rollout`.
    """
    if num_generations <= 0:
        raise ValueError(f"num_generations must be at least 1; found {num_generations}")
    size = len(input_batch["message_log"])
    if size % num_generations:
        raise ValueError(
            f"a batch of {size} samples cannot be divided into groups of num_generations={num_generations}"
        )
    policy, results = await asyncio.to_thread(
        _run_async,
        *(policy_generation, input_batch, tokenizer, task_to_env, max_seq_len, max_rollout_turns),
        greedy=greedy,
        limits=limits,
    )
    batch, _ = _finish(input_batch, results, policy, on_failure, histograms)
    for start in range(0, size, num_generations):
        group = slice(start, start + num_generations)
        yield RolloutGroupResult(
            start // num_generations, batch.slice(group.start, group.stop), _metrics(results[group], histograms)
        )


async def run_sample_multi_turn_rollout(
    sample_idx: int,
    initial_sample_state: Mapping[str, Any],
    policy_generation: Any,
    tokenizer: Any,
    task_to_env: Mapping[str, Any],
    max_seq_len: int,
    max_rollout_turns: int | None = 999999,
    greedy: bool = False,
    *,
    limits: RolloutLimits | None = None,
    deduplicate_multimodal_data: bool = False,  # noqa: ARG001 - newer callers pass it; there is only text
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Roll one sample out.

    Args:
        sample_idx: Its row in the batch; its `idx` where the state has none.
        initial_sample_state: `message_log`, `extra_env_info`, `task_name`, and optionally `stop_strings` and `idx`. It
            is not changed.
        policy_generation: Has `generate_async(batch, greedy=)`, called with batches of one.

    Returns:
        The final state: `message_log`, `extra_env_info`, `task_name`, `total_reward` (a float32 tensor without
        dimensions), `reward/<name>` for each named one, `stop_strings`, `idx`, `stop_reason`; and its metrics:
        `turn_count`, `total_tokens`, `assistant_tokens`, `env_tokens`, `terminated`, `truncated`, `max_turns_reached`,
        `total_reward`, and `turn_gen_tokens`, `turn_input_tokens`, `turn_total_tokens`, lists by turn, and
        `max_gen_tokens_per_turn`.

    Raises:
        AssertionError: The policy does not generate asynchronously.
        ValueError: The task has no environment, or the state cannot be used.
        TrajectoryFailed: The sample failed permanently.
    """
    import torch

    task = initial_sample_state["task_name"]
    refuse_unknown_tasks([task], task_to_env)
    limits = limits or RolloutLimits()
    settings = settings_of(
        limits,
        scheduling="Concurrent",
        batch_size=1,
        max_turns=max_rollout_turns,
        max_sequence_length=max_seq_len,
    )
    policy = StreamPolicy(
        policy_generation, greedy=greedy, pad_token_id=pad_token_of(tokenizer), batch_type=batch_class()
    )
    sample = sample_of(initial_sample_state, sample_idx)
    if settings.max_turns < 1:
        trajectory = _without_turns(sample, settings)
    else:
        async with _rollout(policy, [sample], tokenizer, task_to_env, settings, limits) as rollout:
            flight = rollout.admit(sample)
            await rollout.play(flight)
        if flight.failure is not None:
            raise flight.failure
        trajectory = flight.trajectory
    record = trajectory.record()
    state = {
        "message_log": log_of(initial_sample_state["message_log"], record.messages, with_logprobs=policy.gave_logprobs),
        "extra_env_info": record.metadata,
        "task_name": task,
        "total_reward": torch.tensor(record.total_reward, dtype=torch.float32),
        "stop_strings": list(trajectory.stop_strings or ()) or None,
        "idx": record.idx,
        "stop_reason": record.stop_reason,
        **{name: torch.tensor(total, dtype=torch.float32) for name, total in reward_parts_of(record).items()},
    }
    return state, _sample_metrics(record)


def _sample_metrics(record: TrajectoryRecord) -> dict[str, Any]:
    lengths = lengths_of(record)
    tokens = record.tokens
    return {
        "turn_count": record.turn_count,
        "total_tokens": tokens.generated + tokens.environment,
        "assistant_tokens": tokens.generated,
        "env_tokens": tokens.environment,
        **{ending.flag: record.stop_reason == reason for reason, ending in FINISHED.items()},
        "total_reward": record.total_reward,
        "turn_gen_tokens": lengths.generated,
        "turn_input_tokens": lengths.inputs,
        "turn_total_tokens": lengths.totals,
        "max_gen_tokens_per_turn": max(lengths.generated, default=0),
    }


async def _run(
    policy: PolicyAdapter,
    samples: list[Sample],
    tokenizer: Any,
    task_to_env: Mapping[str, Any],
    settings: RolloutSettings,
    limits: RolloutLimits,
) -> list[Result]:
    if settings.max_turns < 1:
        return [_without_turns(sample, settings).record() for sample in samples]
    results: dict[int, Result] = {}

    async def sink(result: Result) -> None:
        results[result.task_index] = result

    async with _rollout(policy, samples, tokenizer, task_to_env, settings, limits) as rollout:
        await run_rollout(rollout, samples, sink)
    return [results[row] for row in range(len(samples))]


@asynccontextmanager
async def _rollout(
    policy: PolicyAdapter,
    samples: list[Sample],
    tokenizer: Any,
    task_to_env: Mapping[str, Any],
    settings: RolloutSettings,
    limits: RolloutLimits,
) -> AsyncIterator[Rollout]:
    lockstep = settings.scheduling == "Lockstep"
    async with open_environments(
        task_to_env,
        (sample.prompt.task_name for sample in samples),
        step_seconds=limits.step_seconds,
        calls_in_flight=1 if lockstep else limits.environment_calls,
        max_batch=max(1, len(samples)),
    ) as environments:
        try:
            yield Rollout(
                policy=policy,
                environments=environments,
                tokenizer=tokenizer_of(tokenizer),
                settings=settings,
                metrics=RolloutMetrics("nemo_rl"),
            )
        finally:
            await policy.close()


def _without_turns(sample: Sample, settings: RolloutSettings) -> Trajectory:
    """The trajectory of a sample with a limit of no turns: its prompt."""
    trajectory = Trajectory(sample, settings)
    trajectory.stop_reason = trajectory.stop_reason or "max_turns"
    return trajectory


def _finish(
    input_batch: Any,
    results: list[Result],
    policy: PolicyAdapter,
    on_failure: OnFailure,
    histograms: bool | None,
) -> tuple[Any, dict[str, Any]]:
    columns = batch_of(input_batch, results, with_logprobs=policy.gave_logprobs)
    batch = batch_class(input_batch)(columns)
    metrics = _metrics(results, histograms)
    failures = [result for result in results if isinstance(result, FailureRecord)]
    if failures:
        summary = summary_of(failures, len(results))
        if on_failure == "raise":
            raise RolloutFailed(summary, batch, metrics, failures)
        log.error("%s", summary)
        for text in distinct_tracebacks(failures):
            log.error("%s", text)
    return batch, metrics


def _metrics(results: list[Result], histograms: bool | None) -> dict[str, Any]:
    return metrics_of(results, histograms=loggers_take_histograms() if histograms is None else histograms)
