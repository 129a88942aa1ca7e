"""Conversion of the rows of a batch to samples, and of records to rows."""

from __future__ import annotations

import copy
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from kuberoll_workers.adapters.nemo_rl.message_logs import TOKEN_IDS, MessageLog, token_ids_of
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.prompts import Prompt, Sample
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import is_cut

if TYPE_CHECKING:
    import torch

Result = TrajectoryRecord | FailureRecord

_MULTIMODAL = ("vllm_content", "vllm_images", "vllm_videos", "vllm_audios")
# NeMo RL's class for images and the like, by its name: NeMo RL need not be installed.
_PACKED = "PackedTensor"
_TEXT_ONLY = "only text can be rolled out; the policy would not see the rest"
_REWARD_NUMBER = re.compile(r"reward[0-9]+")


def samples_of(batch: Mapping[str, Any], task_names: Mapping[str, Any]) -> list[Sample]:
    """Make one sample for each row; they share no data with the batch.

    Args:
        batch: Columns `message_log`, `extra_env_info`, `task_name`, and optionally `stop_strings` and `idx`.
        task_names: Tasks that have an environment.

    Raises:
        ValueError: A task has no environment, or a row cannot be used; the message names the row.
    """
    refuse_unknown_tasks(batch["task_name"], task_names)
    optional = [name for name in ("stop_strings", "idx", *_MULTIMODAL) if batch.get(name) is not None]
    names = ("message_log", "extra_env_info", "task_name", *optional)
    return [sample_of({name: batch[name][row] for name in names}, row) for row in range(len(batch["message_log"]))]


def _holds_something(entry: Any) -> bool:
    return entry is not None and len(entry) > 0


def refuse_unknown_tasks(names: Sequence[str], known: Mapping[str, Any]) -> None:
    """Check that each task has an environment.

    Raises:
        ValueError: One has none; the message names the first.
    """
    for name in names:
        if name not in known:
            raise ValueError(f"No environment found for task type: {name}")


def sample_of(state: Mapping[str, Any], row: int) -> Sample:
    """The sample of one row.

    Raises:
        ValueError: The row cannot be used.
    """
    for name in _MULTIMODAL:
        if _holds_something(state.get(name)):
            raise ValueError(f"{name}[{row}]: {_TEXT_ONLY}")
    messages = tuple(_message(message, f"message_log[{row}][{at}]") for at, message in enumerate(state["message_log"]))
    ids = token_array()
    for message in messages:
        ids.extend(message.token_ids)
    return Sample(
        prompt=Prompt(
            task_index=row,
            task_name=state["task_name"],
            idx=copy.deepcopy(state.get("idx", row)),
            messages=messages,
            token_ids=ids,
            metadata=copy.deepcopy(state["extra_env_info"]),
            stop_strings=stops_of(state.get("stop_strings")),
            sampling={},
        ),
        rollout_index=0,
        seed=None,
    )


def stops_of(stop_strings: Any) -> tuple[str, ...] | None:
    """A row's stop strings; one text is one of them."""
    if stop_strings is None:
        return None
    return (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)


def log_of(prompt: Sequence[Mapping[str, Any]], messages: Sequence[Message], *, with_logprobs: bool) -> MessageLog:
    """The message log of a trajectory: the caller's own prompt messages, copied, and what the rollout added.

    Args:
        with_logprobs: Whether the policy returns log-probabilities, so that an empty response has empty ones.
    """
    log: MessageLog = copy.deepcopy([dict(message) for message in prompt])
    for message in messages[len(log) :]:
        entry: dict[str, Any] = {
            # NeMo RL's training steps learn from all of this role.
            "role": "environment" if message.role == "assistant" and not message.sampled else message.role,
            "content": message.content,
            TOKEN_IDS: _tensor(message.token_ids, numpy.int64),
        }
        if message.logprobs is not None and with_logprobs:
            entry["generation_logprobs"] = _tensor(message.logprobs, numpy.float32)
        log.append(entry)
    return log


def batch_of(batch: Mapping[str, Any], results: Sequence[Result], *, with_logprobs: bool) -> dict[str, Any]:
    """Make the columns of a finished batch; those that the rollout does not set are copies of the caller's.

    Args:
        batch: The caller's batch.
        results: One for each of its rows, in their order.

    Returns:
        - `message_log`, `extra_env_info` (the last state), `task_name`, `idx`;
        - `total_reward`, float32, and `reward/<name>` for each named one: NaN for a failed sample;
        - `truncated`, bool; `stop_reason`, texts; `failure`, the FailureRecord of a failed sample, else None;
        - `loss_multiplier`, where the batch has it, 0 for a failed sample;
        - all others.
    """
    import torch

    rows = range(len(results))
    finished = [result if isinstance(result, TrajectoryRecord) else None for result in results]
    columns: dict[str, Any] = {
        "message_log": [
            log_of(batch["message_log"][row], results[row].messages, with_logprobs=with_logprobs) for row in rows
        ],
        "extra_env_info": [
            # Copied too: an environment may have returned one object for several samples.
            copy.deepcopy(batch["extra_env_info"][row] if record is None else record.metadata)
            for row, record in zip(rows, finished, strict=True)
        ],
        "task_name": list(batch["task_name"]),
        "total_reward": torch.tensor(
            [math.nan if record is None else record.total_reward for record in finished], dtype=torch.float32
        ),
        "idx": list(rows) if batch.get("idx") is None else copy.deepcopy(batch["idx"]),
        "stop_reason": [result.stop_reason for result in results],
        "truncated": torch.tensor([is_cut(result.stop_reason) for result in results], dtype=torch.bool),
        "failure": [result if isinstance(result, FailureRecord) else None for result in results],
    }
    parts = [None if record is None else reward_parts_of(record) for record in finished]
    for name in dict.fromkeys(name for sums in parts if sums is not None for name in sums):
        columns[name] = torch.tensor(
            [math.nan if sums is None else sums.get(name, 0.0) for sums in parts], dtype=torch.float32
        )
    for name, column in batch.items():
        if name not in columns:
            columns[name] = copy.deepcopy(column)
    if columns.get("loss_multiplier") is not None:
        for row, record in zip(rows, finished, strict=True):
            if record is None:
                columns["loss_multiplier"][row] = 0
    return columns


def _tensor(numbers: Sequence[float], kind: Any) -> torch.Tensor:
    import torch

    # Through NumPy, which copies the memory of an array; torch would read each element.
    return torch.from_numpy(numpy.array(numbers, dtype=kind))


def reward_parts_of(record: TrajectoryRecord) -> dict[str, float]:
    """The sums of a trajectory's named rewards, by the names of their columns."""
    return {_reward_column(name): sum(values) for name, values in sorted(record.reward_parts.items())}


def _reward_column(name: str) -> str:
    # NeMo RL's own environments already use these names; unnamed rewards are reward1, reward2, ... there, too.
    return name if name.startswith("reward/") or _REWARD_NUMBER.fullmatch(name) else f"reward/{name}"


def refuse_media(messages: Sequence[Mapping[str, Any]], where: str) -> None:
    """Check that messages are text.

    Raises:
        ValueError: One has something else; the message names it.
    """
    for at, message in enumerate(messages):
        _refuse_media(message, f"{where}[{at}]")


def _refuse_media(message: Mapping[str, Any], where: str) -> None:
    for name, value in message.items():
        if (name in _MULTIMODAL and _holds_something(value)) or type(value).__name__ == _PACKED:
            raise ValueError(f"{where}.{name}: {_TEXT_ONLY}")


def _message(message: Mapping[str, Any], where: str) -> Message:
    _refuse_media(message, where)
    if TOKEN_IDS not in message:
        raise ValueError(f"{where}: token_ids are missing; prompts are tokenized by the dataset")
    try:
        ids: array[int] = token_array(token_ids_of(message[TOKEN_IDS]).tolist())
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from error
    return Message(role=message["role"], content=message["content"], token_ids=ids)
