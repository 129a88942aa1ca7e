"""TRL's format: a conversational prompt and completion with its reward, also in exact tokens."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from kuberoll_workers.analysis.export.chats import CHAT_ROLES
from kuberoll_workers.analysis.export.columns import message_type
from kuberoll_workers.analysis.export.formats import Format
from kuberoll_workers.analysis.export.samplings import sampling_text, whole
from kuberoll_workers.analysis.export.views import chat_with_calls, spoken, token_view
from kuberoll_workers.data.messages import PROMPT_TURN
from kuberoll_workers.data.record import TrajectoryRecord

if TYPE_CHECKING:
    import pyarrow


def row(record: TrajectoryRecord, role: str, path: int) -> dict[str, Any]:
    """Convert a trajectory to a row.

    SFTTrainer accepts `input_ids` with `assistant_masks` as tokenized data; a `rollout_func` of GRPOTrainer returns
    `prompt_ids`, `completion_ids`, `logprobs` and `env_mask`. Its other columns are arguments of reward functions.
    `model_version` is AsyncGRPOTrainer's: the oldest version that sampled a token. `tools` is there only if there are.
    """
    messages = spoken(record)
    prompt = [message for message in messages if message.turn == PROMPT_TURN]
    completion = [message for message in messages if message.turn > PROMPT_TURN]
    tokens = token_view(record)
    versions = tokens.version_range()
    return {
        "prompt": chat_with_calls(prompt, known=CHAT_ROLES, otherwise=role),
        "completion": chat_with_calls(completion, known=CHAT_ROLES, otherwise=role),
        "reward": record.total_reward,
        "input_ids": [*tokens.prompt_ids, *tokens.completion_ids],
        "assistant_masks": [*([0] * len(tokens.prompt_ids)), *tokens.mask],
        "prompt_ids": tokens.prompt_ids,
        "completion_ids": tokens.completion_ids,
        "logprobs": tokens.logprobs,
        "env_mask": tokens.mask,
        "policy_versions": tokens.policy_versions,
        "model_version": None if versions is None else versions[0],
        "token_source": record.token_source,
        "sampling": sampling_text(record),
        "environment": record.task_name,
        "task_index": record.task_index,
        "rollout_index": record.rollout_index,
        "path": path,
        "stop_reason": record.stop_reason,
        **({} if record.tools is None else {"tools": record.tools}),
    }


@cache
def schema(calls: bool) -> pyarrow.Schema:
    """Columns of a Parquet file.

    Args:
        calls: With those of tools and calls.
    """
    import pyarrow as pa

    messages = pa.list_(message_type(calls))
    ids, bits = pa.list_(pa.int32()), pa.list_(pa.int8())
    return pa.schema(
        [
            ("prompt", messages),
            ("completion", messages),
            ("reward", pa.float64()),
            ("input_ids", ids),
            ("assistant_masks", bits),
            ("prompt_ids", ids),
            ("completion_ids", ids),
            ("logprobs", pa.list_(pa.float32())),
            ("env_mask", bits),
            ("policy_versions", pa.list_(pa.string())),
            ("model_version", pa.int64()),
            ("token_source", pa.string()),
            ("sampling", pa.string()),
            ("environment", pa.string()),
            ("task_index", pa.int64()),
            ("rollout_index", pa.int64()),
            ("path", pa.int32()),
            ("stop_reason", pa.string()),
            *([("tools", pa.json_())] if calls else []),
        ]
    )


FORMAT = Format(name="trl", containers=("parquet", "jsonl"), row=row, schema=schema, assumption=whole)
