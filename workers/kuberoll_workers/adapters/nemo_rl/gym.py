"""NeMo RL's rollouts by NeMo Gym: `run_async_nemo_gym_rollout` and `run_nemo_gym_rollout_sync`."""

from __future__ import annotations

import copy
import logging
import math
import time
import warnings
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kuberoll_workers.adapters.nemo_rl.batched_data_dict import batch_class
from kuberoll_workers.adapters.nemo_rl.calls import CallerContext, run_sync
from kuberoll_workers.adapters.nemo_rl.conversion import refuse_media
from kuberoll_workers.adapters.nemo_rl.failures import (
    OnFailure,
    RolloutFailed,
    distinct_tracebacks,
    summary_of,
)
from kuberoll_workers.adapters.nemo_rl.gym_metrics import gym_metrics
from kuberoll_workers.adapters.nemo_rl.gym_rewards import Penalties, shape_by_effort
from kuberoll_workers.adapters.nemo_rl.gym_rows import GymRollout, prepared_rows, task_index_of
from kuberoll_workers.adapters.nemo_rl.gym_stream import GymStream
from kuberoll_workers.adapters.nemo_rl.limits import RolloutLimits
from kuberoll_workers.adapters.nemo_rl.message_logs import (
    TOKEN_IDS,
    MessageLog,
    batched_message_log_to_flat_message,
    token_ids_of,
)
from kuberoll_workers.adapters.nemo_rl.tokenizers import pad_token_of
from kuberoll_workers.data.record import FailureRecord
from kuberoll_workers.rollouts.failures import TrajectoryFailed

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_TIMER = "timing/rollout"


@dataclass(frozen=True, slots=True)
class NemoGymRolloutResult:
    """Rollouts of one prompt group, or of a whole batch.

    Attributes:
        input_ids: Ids of the prompts, int64 `[samples, longest]`, padded on the right.
        final_batch: Columns `agent_ref`, `message_log`, `length` (of the prompt), `loss_multiplier`, `total_reward`
            (float32), `truncated` (bool), `mask_sample` (bool, if requested), `reward/<component>` (float32), and
            ours: `stop_reason` and `failure`, as in `conversion.batch_of`.
        rollout_metrics: As `gym_metrics.gym_metrics` returns them; the last result also has the timings, in seconds.
        task_index: The rows' `_ng_task_index`; None if they have none.
    """

    input_ids: torch.Tensor
    final_batch: Any
    rollout_metrics: dict[str, Any]
    task_index: int | None


async def run_async_nemo_gym_rollout(
    policy_generation: Any,
    input_batch: Any,
    tokenizer: Any,
    task_to_env: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    num_generations: int,
    log_full_result_tables: bool,
    max_seq_len: int | None = None,
    max_rollout_turns: int | None = None,
    greedy: bool = False,
    effort_config: Any = None,
    reward_penalty_config: Any = None,
    thinking_tags: Sequence[str] | None = None,
    mask_env_flagged_samples: bool = True,
    returns_entire_batch: bool = False,
    sampling_params: Any = None,
    deduplicate_multimodal_data: bool = False,  # noqa: ARG001 - the actor returns media whole
    debug_payload_metrics: bool = False,  # noqa: ARG001 - NeMo RL prints sizes for it; there is nothing to print
    *,
    on_failure: OnFailure = "mark",
    limits: RolloutLimits | None = None,
) -> AsyncGenerator[NemoGymRolloutResult, None]:
    """Have NeMo Gym roll a batch out, and yield each prompt group as it becomes complete.

    The caller's batch is not changed. A row fails alone, after `limits.environment_attempts` attempts: it has the
    `total_reward` NaN, the `loss_multiplier` 0, `mask_sample` true, and the prompt of the caller's `message_log`, or
    an empty one.

    Args:
        policy_generation: Its `cfg` has the engine's window: `max_model_len` of `vllm_cfg`, `trtllm_cfg` or
            `mcore_generation_config`, else `max_total_sequence_length`.
        input_batch: Columns `extra_env_info` (NeMo Gym's rows), `loss_multiplier`, and optionally `message_log`, `idx`.
        task_to_env: `nemo_gym` is NeMo RL's actor, spun up and with its tokenizer, or an object with its
            `run_rollouts` (`gym_stream.GymStream`).
        generation_config: `max_new_tokens`, `temperature`, `top_p`, `top_k`; no stop strings or ids.
        num_generations: Number of consecutive rows that are one prompt group.
        log_full_result_tables: Add a table with each agent's complete results to the metrics.
        max_rollout_turns: None: NeMo Gym's agents limit their turns.
        effort_config, reward_penalty_config, thinking_tags: As in `gym_rewards`.
        mask_env_flagged_samples: Add the column `mask_sample`.
        returns_entire_batch: Take the batch as one group whose agents may differ.
        sampling_params: Its `temperature`, `top_p` and `top_k` replace those of `generation_config`.
        on_failure: As in `run_multi_turn_rollout`; the error comes after all groups without failures, and has the batch
            of all others.

    Raises:
        AssertionError: An option has no effect in NeMo Gym; the message names it.
        TypeError: A row is none of NeMo Gym's.
        ValueError: Rows do not make up whole groups, groups mix agents or tasks, or the environment returned a row
            twice or unasked.
        RolloutFailed: Samples failed, and `on_failure` is "raise".
    """
    started = time.perf_counter()
    window = _window_of(policy_generation.cfg)
    _refuse_options(max_rollout_turns, greedy, generation_config)
    if max_seq_len is not None and max_seq_len > window:
        warnings.warn(
            f"max_seq_len is {max_seq_len} but the engine's window is {window}: sequences end there. "
            "Raise max_model_len, or lower max_total_sequence_length",
            stacklevel=2,
        )
    rows = prepared_rows(
        input_batch["extra_env_info"],
        **_sampling_of(generation_config, sampling_params),
        max_new_tokens=generation_config["max_new_tokens"],
    )
    _check_groups(rows, num_generations, whole=returns_entire_batch)
    _check_media(input_batch, len(rows))
    grouping = _Grouping(
        rows=rows,
        batch=input_batch,
        pad=pad_token_of(tokenizer),
        effort=effort_config,
        penalties=Penalties(reward_penalty_config, tokenizer, thinking_tags),
        tables=log_full_result_tables,
        masks=mask_env_flagged_samples,
    )
    if "nemo_gym" not in task_to_env:
        raise ValueError("No environment found for task type: nemo_gym")
    stream = GymStream(
        task_to_env["nemo_gym"], rows, timer_prefix=_TIMER, window=window, limits=limits or RolloutLimits()
    )
    waited = 0.0
    found: dict[int, GymRollout | TrajectoryFailed] = {}
    failed_rows: list[int] = []
    last: NemoGymRolloutResult | None = None
    async with aclosing(stream.outcomes()) as outcomes:
        while True:
            before = time.perf_counter()
            outcome = await anext(outcomes, None)
            waited += time.perf_counter() - before
            if outcome is None:
                break
            found[outcome.row] = outcome.rollout
            group = range(first := outcome.row - outcome.row % num_generations, first + num_generations)
            if any(row not in found for row in group):
                continue
            if on_failure == "raise" and any(isinstance(found[row], TrajectoryFailed) for row in group):
                failed_rows += group
                continue
            result = grouping.result({row: found[row] for row in group})
            if len(found) == len(rows) and not failed_rows:
                last = result
            else:
                yield result
    timings = {
        **stream.timings,
        f"{_TIMER}/run_rollouts": waited,
        f"{_TIMER}/total": time.perf_counter() - started,
    }
    if last is not None:
        last.rollout_metrics.update(timings)
        yield last
    if failed_rows:
        chosen = sorted(failed_rows)
        result = grouping.result({row: found[row] for row in chosen}, one_group=False)
        failures = [failure for failure in result.final_batch["failure"] if failure is not None]
        result.rollout_metrics.update(timings)
        raise RolloutFailed(summary_of(failures, len(rows)), result.final_batch, result.rollout_metrics, failures)


def run_nemo_gym_rollout_sync(
    policy_generation: Any,
    input_batch: Any,
    tokenizer: Any,
    task_to_env: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    log_full_result_tables: bool,
    max_seq_len: int | None = None,
    max_rollout_turns: int | None = None,
    greedy: bool = False,
    effort_config: Any = None,
    reward_penalty_config: Any = None,
    thinking_tags: Sequence[str] | None = None,
    sampling_params: Any = None,
    mask_env_flagged_samples: bool = True,
    deduplicate_multimodal_data: bool = False,
    debug_payload_metrics: bool = False,
    *,
    on_failure: OnFailure = "mark",
    limits: RolloutLimits | None = None,
) -> NemoGymRolloutResult:
    """Have NeMo Gym roll a batch out; arguments and errors are those of `run_async_nemo_gym_rollout`.

    The batch is one group whose agents may differ. It also works inside a running event loop.
    """

    async def only() -> NemoGymRolloutResult:
        results = run_async_nemo_gym_rollout(
            policy_generation,
            input_batch,
            tokenizer,
            task_to_env,
            generation_config,
            len(input_batch["extra_env_info"]),
            log_full_result_tables,
            max_seq_len=max_seq_len,
            max_rollout_turns=max_rollout_turns,
            greedy=greedy,
            effort_config=effort_config,
            reward_penalty_config=reward_penalty_config,
            thinking_tags=thinking_tags,
            mask_env_flagged_samples=mask_env_flagged_samples,
            returns_entire_batch=True,
            sampling_params=sampling_params,
            deduplicate_multimodal_data=deduplicate_multimodal_data,
            debug_payload_metrics=debug_payload_metrics,
            on_failure=on_failure,
            limits=limits,
        )
        async with aclosing(results):
            return await anext(results)

    return run_sync(only, CallerContext())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grouping:
    """What turns the rollouts of some rows into a result."""

    rows: Sequence[dict[str, Any]]
    batch: Any
    pad: int
    effort: Any
    penalties: Penalties
    tables: bool
    masks: bool

    def result(
        self, outcomes: Mapping[int, GymRollout | TrajectoryFailed], *, one_group: bool = True
    ) -> NemoGymRolloutResult:
        import torch

        rows = [self.rows[row] for row in outcomes]
        rollouts = [outcome if isinstance(outcome, GymRollout) else None for outcome in outcomes.values()]
        finished = [rollout for rollout in rollouts if rollout is not None]
        of_finished = [row for row, rollout in zip(rows, rollouts, strict=True) if rollout is not None]
        extra = shape_by_effort(of_finished, finished, self.effort) | self.penalties.apply(finished)
        logs = [
            self._prompt(row) if rollout is None else rollout.message_log
            for row, rollout in zip(outcomes, rollouts, strict=True)
        ]
        failures = [
            self._failure(row, outcome) if isinstance(outcome, TrajectoryFailed) else None
            for row, outcome in outcomes.items()
        ]
        flat, lengths = batched_message_log_to_flat_message([entry[:1] for entry in logs], {TOKEN_IDS: self.pad})
        columns: dict[str, Any] = {
            "agent_ref": [row["agent_ref"] for row in rows],
            "message_log": logs,
            "length": lengths.to(torch.int64),
            "loss_multiplier": self._loss_multiplier(outcomes, failures),
            "total_reward": _floats([math.nan if rollout is None else rollout.reward for rollout in rollouts]),
            "truncated": torch.tensor([rollout is not None and rollout.truncated for rollout in rollouts]),
            "stop_reason": [
                "failed" if rollout is None else "truncated" if rollout.truncated else "terminated"
                for rollout in rollouts
            ],
            "failure": failures,
        }
        if self.masks:
            columns["mask_sample"] = torch.tensor([rollout is None or rollout.mask_sample for rollout in rollouts])
        components = [None if rollout is None else rollout.reward_components for rollout in rollouts]
        for name in sorted({name for parts in components for name in parts or ()}):
            columns[f"reward/{name}"] = _floats(
                [math.nan if parts is None else parts.get(name, 0.0) for parts in components]
            )
        _report([failure for failure in failures if failure is not None], len(rows))
        return NemoGymRolloutResult(
            input_ids=flat[TOKEN_IDS],
            final_batch=batch_class(self.batch)(columns),
            rollout_metrics=gym_metrics(rows, rollouts, full_results=self.tables) | extra,
            task_index=task_index_of(rows) if one_group else None,
        )

    def _prompt(self, row: int) -> MessageLog:
        import torch

        given = self.batch.get("message_log")
        messages: MessageLog = copy.deepcopy([dict(message) for message in given[row]]) if given is not None else []
        for message in messages:
            message[TOKEN_IDS] = token_ids_of(message.get(TOKEN_IDS, ()))
        empty = {"role": "user", "content": "", TOKEN_IDS: torch.empty(0, dtype=torch.int64)}
        return messages or [empty]

    def _loss_multiplier(self, rows: Mapping[int, Any], failures: Sequence[FailureRecord | None]) -> Any:
        given = self.batch["loss_multiplier"]
        chosen = [given[row] for row in rows]
        kept = [0 if failure is not None else value for value, failure in zip(chosen, failures, strict=True)]
        return given.new_tensor(kept) if hasattr(given, "new_tensor") else kept

    def _failure(self, row: int, failed: TrajectoryFailed) -> FailureRecord:
        given = self.batch.get("idx")
        return FailureRecord(
            task_index=row,
            rollout_index=0,
            task_name="nemo_gym",
            idx=row if given is None else copy.deepcopy(given[row]),
            kind=failed.kind,
            stage=failed.stage,
            cause=str(failed),
            tries=failed.tries,
            attempt=0,
            turn_count=0,
            seed=None,
            messages=[],
            frames=None if failed.traceback is None else list(failed.traceback.frames),
            traceback=None if failed.traceback is None else failed.traceback.text,
        )


def _floats(values: Sequence[float]) -> torch.Tensor:
    import torch

    return torch.tensor(values, dtype=torch.float32)


def _report(failures: list[FailureRecord], samples: int) -> None:
    if not failures:
        return
    log.error("%s", summary_of(failures, samples))
    for text in distinct_tracebacks(failures):
        log.error("%s", text)


def _window_of(config: Mapping[str, Any]) -> int:
    for name in ("vllm_cfg", "trtllm_cfg", "mcore_generation_config"):
        if name in config:
            return int(config[name]["max_model_len"])
    return int(config["max_total_sequence_length"])


def _refuse_options(max_rollout_turns: int | None, greedy: bool, generation_config: Mapping[str, Any]) -> None:
    assert not greedy, "`greedy` is not supported in NeMo-Gym path!"
    assert max_rollout_turns is None, "`max_rollout_turns` is not supported in NeMo-Gym path!"
    for name in ("stop_strings", "stop_token_ids"):
        assert not generation_config.get(name), f"generation_config.{name}: NeMo Gym has no stop criteria; set none"


def _sampling_of(config: Mapping[str, Any], given: Any) -> dict[str, Any]:
    found = {
        name: config.get(name) if given is None else getattr(given, name) for name in ("temperature", "top_p", "top_k")
    }
    assert not found.pop("top_k"), "top_k: NeMo Gym's API has no such parameter; set it to null"
    return found


def _check_groups(rows: Sequence[Mapping[str, Any]], size: int, *, whole: bool) -> None:
    if not rows:
        raise ValueError("extra_env_info: there are no rows of NeMo Gym")
    if size <= 0:
        raise ValueError(f"num_generations must be greater than zero; found {size}")
    if len(rows) % size or (whole and len(rows) != size):
        words = "must be num_generations with returns_entire_batch" if whole else "must be divisible by num_generations"
        raise ValueError(f"the number of rows, {len(rows)}, {words}, {size}")
    for first in range(0, len(rows), size):
        group = rows[first : first + size]
        agents = sorted({row["agent_ref"]["name"] for row in group})
        if not whole and len(agents) != 1:
            raise ValueError(
                f"extra_env_info[{first}]: the rows of one prompt group must have one agent; found {agents}"
            )
        task_index_of(group)


def _check_media(batch: Any, count: int) -> None:
    logs = batch.get("message_log")
    if logs is None:
        return
    if len(logs) != count:
        raise ValueError(f"message_log has {len(logs)} entries but extra_env_info {count}")
    for row, messages in enumerate(logs):
        refuse_media(messages, f"message_log[{row}]")
