"""verl's format: columns of its RL datasets, `messages` for its SFT, and an agent loop's output in exact tokens."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import orjson

from kuberoll_workers.analysis.export.chats import CHAT_ROLES
from kuberoll_workers.analysis.export.columns import message_type
from kuberoll_workers.analysis.export.formats import Format
from kuberoll_workers.analysis.export.samplings import sampling_text, whole
from kuberoll_workers.analysis.export.views import chat_with_calls, ground_truth, spoken, token_view
from kuberoll_workers.data.messages import PROMPT_TURN
from kuberoll_workers.data.record import TrajectoryRecord

if TYPE_CHECKING:
    import pyarrow


def row(record: TrajectoryRecord, role: str, path: int) -> dict[str, Any]:
    """Convert a trajectory to a row.

    The columns from `prompt_ids` to `extra_fields` are those of verl's `AgentLoopOutput`. `min_global_steps` and
    `max_global_steps` are verl's names for the oldest and newest version that sampled a token. `tools`, which its SFT
    reads, is there only if there are.
    """
    chat_messages = chat_with_calls(record_messages := spoken(record), known=CHAT_ROLES, otherwise=role)
    prompt = sum(message.turn == PROMPT_TURN for message in record_messages)
    tokens = token_view(record)
    oldest, newest = tokens.version_range() or (None, None)
    return {
        "data_source": record.task_name,
        "prompt": chat_messages[:prompt],
        "ability": record.task_name,
        "reward_model": {"style": "rule", "ground_truth": ground_truth(record.metadata)},
        "extra_info": {
            "index": record.task_index,
            "split": "train",
            "rollout_index": record.rollout_index,
            "stop_reason": record.stop_reason,
            "rewards": record.rewards,
            "group_reward": record.group_reward,
            # JSON whose form depends on the environment, as text: a column has a single type.
            "idx": orjson.dumps(record.idx).decode(),
            "metadata": orjson.dumps(record.metadata).decode(),
        },
        "messages": chat_messages,
        "prompt_ids": tokens.prompt_ids,
        "response_ids": tokens.completion_ids,
        "response_mask": tokens.mask,
        "response_logprobs": tokens.logprobs,
        "reward_score": record.total_reward,
        "num_turns": len(chat_messages),
        "extra_fields": {
            "task_index": record.task_index,
            "rollout_index": record.rollout_index,
            "min_global_steps": oldest,
            "max_global_steps": newest,
            "policy_versions": tokens.policy_versions,
            "token_source": record.token_source,
            "sampling": sampling_text(record),
        },
        "task_index": record.task_index,
        "rollout_index": record.rollout_index,
        "path": path,
        **({} if record.tools is None else {"tools": record.tools}),
    }


@cache
def schema(calls: bool) -> pyarrow.Schema:
    """Columns of a Parquet file.

    Args:
        calls: With those of tools and calls.
    """
    import pyarrow as pa

    text = pa.string()
    messages = pa.list_(message_type(calls))
    ids = pa.list_(pa.int32())
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", messages),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            (
                "extra_info",
                pa.struct(
                    [
                        ("index", pa.int64()),
                        ("split", text),
                        ("rollout_index", pa.int64()),
                        ("stop_reason", text),
                        ("rewards", pa.list_(pa.float64())),
                        ("group_reward", pa.float64()),
                        ("idx", text),
                        ("metadata", text),
                    ]
                ),
            ),
            ("messages", messages),
            ("prompt_ids", ids),
            ("response_ids", ids),
            ("response_mask", pa.list_(pa.int8())),
            ("response_logprobs", pa.list_(pa.float32())),
            ("reward_score", pa.float64()),
            ("num_turns", pa.int32()),
            (
                "extra_fields",
                pa.struct(
                    [
                        ("task_index", pa.int64()),
                        ("rollout_index", pa.int64()),
                        ("min_global_steps", pa.int64()),
                        ("max_global_steps", pa.int64()),
                        ("policy_versions", pa.list_(text)),
                        ("token_source", text),
                        ("sampling", text),
                    ]
                ),
            ),
            ("task_index", pa.int64()),
            ("rollout_index", pa.int64()),
            ("path", pa.int32()),
            *([("tools", pa.json_())] if calls else []),
        ]
    )


FORMAT = Format(name="verl", containers=("parquet", "jsonl"), row=row, schema=schema, assumption=whole)
