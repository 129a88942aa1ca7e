"""Batches as verl's trainers take them; needs PyTorch, and verl only where its classes are made.

The keys and shapes are those of verl's agent loop: `AgentLoopOutput`, and `_postprocess` of
verl/experimental/agent_loop/agent_loop.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from kuberoll.trainer.adapters.rows import (
    BatchUnfit,
    Row,
    common_temperature,
    require_one_path,
    require_sampling,
    rows_of,
)
from kuberoll.trainer.batch import Batch
from kuberoll_workers.data.record import TrajectoryRecord

if TYPE_CHECKING:
    import torch


class DataProtoParts(TypedDict):
    """Arguments of verl's `DataProto.from_dict`."""

    tensors: dict[str, torch.Tensor]
    non_tensors: dict[str, npt.NDArray[Any]]
    meta_info: dict[str, Any]


def to_data_proto_tensors(
    batch: Batch, *, prompt_length: int | None = None, response_length: int | None = None, pad_id: int = 0
) -> DataProtoParts:
    """The parts of verl's `DataProto` of a batch, after generation and rewards: `DataProto.from_dict(**parts)`.

    Args:
        prompt_length: Tokens of all prompts with their padding, `data.max_prompt_length`; None: as of the longest.
        response_length: Tokens of all responses with their padding, `data.max_response_length`; None: as of the
            longest.
        pad_id: The tokenizer's padding.

    Returns:
        `tensors`, by rows: `prompts` [rows, prompt], padded on the left; `responses` [rows, response], padded on the
        right, with the tokens of observations; `response_mask` [rows, response], 1 for sampled tokens; `input_ids`,
        `attention_mask` and `position_ids` [rows, prompt + response], int64; `rollout_log_probs` [rows, response],
        float32, 0 where nothing was sampled; `rm_scores` [rows, response], float32, the trajectory's reward at the last
        token of its response. `non_tensors`, [rows]: `uid`, the same for a prompt group; `__num_turns__`, messages;
        `data_source`, the environment; `task_index`, `rollout_index`, `policy_version`, the oldest of a row's tokens.
        `meta_info["temperature"]` is that of the batch, by which verl divides logits.

    Raises:
        BatchUnfit: Rows were sampled at several temperatures, or otherwise than by one, a row is
            longer than allowed, a trajectory has branches, or versions are not whole numbers.
    """
    import torch

    rows = _rows(batch)
    prompt_size = _size([len(row.prompt_ids) for row in rows], prompt_length, "prompt", "prompt_length", batch)
    response_size = _size(
        [len(row.completion_ids) for row in rows], response_length, "response", "response_length", batch
    )
    shape = len(rows), prompt_size + response_size
    ids = np.full(shape, pad_id, np.int64)
    attention, sampled = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    logprobs, scores = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for place, row in enumerate(rows):
        begin, end = prompt_size - len(row.prompt_ids), prompt_size + len(row.completion_ids)
        ids[place, begin:prompt_size], ids[place, prompt_size:end] = row.prompt_ids, row.completion_ids
        attention[place, begin:end] = 1
        sampled[place, prompt_size:end] = row.sampled
        logprobs[place, prompt_size:end] = row.logprobs
        scores[place, end - 1] = batch.reward[row.number]
    arrays = {
        "prompts": ids[:, :prompt_size],
        "responses": ids[:, prompt_size:],
        "response_mask": sampled[:, prompt_size:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(1) - 1, 0),
        "rollout_log_probs": logprobs[:, prompt_size:],
        "rm_scores": scores[:, prompt_size:],
    }
    groups = [batch.groups[int(batch.group[row.number])] for row in rows]
    return DataProtoParts(
        tensors={name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()},
        non_tensors={
            "uid": np.array([f"{group.key.task_index}-{group.key.number}" for group in groups], object),
            "__num_turns__": np.array([_messages(_record_of(batch, row)) for row in rows], np.int32),
            "data_source": np.array([group.task_name for group in groups], object),
            "task_index": batch.task_index.copy(),
            "rollout_index": batch.rollout_index.copy(),
            "policy_version": np.array([row.oldest_version for row in rows], np.int64),
        },
        meta_info={
            "temperature": common_temperature(batch),
            "metrics": [_metrics(_record_of(batch, row)) for row in rows],
            "reward_extra_keys": [],
        },
    )


def agent_loop_outputs(batch: Batch, *, temperature: float = 1.0) -> list[dict[str, Any]]:
    """The fields of verl's `AgentLoopOutput` of each row: `AgentLoopOutput(**fields)`.

    For agent loops of one's own, whose `run` returns a trajectory; verl pads it.

    Args:
        temperature: verl's `actor_rollout_ref.rollout.temperature`.

    Raises:
        BatchUnfit: A trajectory was sampled otherwise, a trajectory has branches, or versions are not whole numbers.
    """
    require_sampling(batch, temperature=temperature)
    return [
        {
            "prompt_ids": row.prompt_ids.tolist(),
            "response_ids": row.completion_ids.tolist(),
            "response_mask": row.sampled.astype(int).tolist(),
            "response_logprobs": row.logprobs.tolist(),
            "reward_score": float(batch.reward[row.number]),
            "num_turns": _messages(_record_of(batch, row)),
            "metrics": _metrics(_record_of(batch, row)),
            "extra_fields": {
                "task_index": int(batch.task_index[row.number]),
                "rollout_index": int(batch.rollout_index[row.number]),
                "policy_version": row.oldest_version,
            },
        }
        for row in _rows(batch)
    ]


def _rows(batch: Batch) -> list[Row]:
    require_one_path(batch, "verl takes one row for each: leave such trajectories out of the run")
    return list(rows_of(batch))


def _size(lengths: list[int], wanted: int | None, what: str, argument: str, batch: Batch) -> int:
    longest = max(lengths, default=0)
    if wanted is None:
        return longest
    if longest > wanted:
        row = lengths.index(longest)
        raise BatchUnfit(
            f"task {batch.task_index[row]}, rollout {batch.rollout_index[row]}: its {what} has {longest} tokens, and "
            f"{argument} is {wanted}: raise verl's data.max_{argument}, or shorten trajectories with "
            "spec.rollout.maxSequenceLength"
        )
    return wanted


def _record_of(batch: Batch, row: Row) -> TrajectoryRecord:
    group = batch.groups[int(batch.group[row.number])]
    rollout = int(batch.rollout_index[row.number])
    return next(record for record in group.trajectories if record.rollout_index == rollout)


def _messages(record: TrajectoryRecord) -> int:
    """Number of messages until the last response, as verl counts the turns of a chat."""
    return max((place + 1 for place, message in enumerate(record.messages) if message.sampled), default=1)


def _metrics(record: TrajectoryRecord) -> dict[str, float]:
    """verl's seconds of a trajectory in generation and in tools."""
    return {
        "generate_sequences": float(sum(record.timing.generation_seconds)),
        "tool_calls": float(sum(record.timing.environment_seconds)),
    }
