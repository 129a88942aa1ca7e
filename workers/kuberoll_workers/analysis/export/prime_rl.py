"""prime-rl's formats: `messages` for its SFT, and the fields of a `TrainingSample`, in exact tokens."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from kuberoll_workers.analysis.export.chats import CHAT_ROLES
from kuberoll_workers.analysis.export.columns import message_type
from kuberoll_workers.analysis.export.formats import Format
from kuberoll_workers.analysis.export.samplings import but_temperature, sampling_text
from kuberoll_workers.analysis.export.views import chat_with_calls, spoken, token_view
from kuberoll_workers.data.record import TrajectoryRecord

if TYPE_CHECKING:
    import pyarrow


def row(record: TrajectoryRecord, role: str, path: int) -> dict[str, Any]:
    """Convert a trajectory to a row.

    The columns from `token_ids` to `env_name` are fields of a `TrainingSample`, over the whole sequence; its
    advantages are those of an algorithm. `tools` is there only if there are.
    """
    tokens = token_view(record)
    prompt = len(tokens.prompt_ids)
    versions = tokens.version_range()
    return {
        "messages": chat_with_calls(spoken(record), known=CHAT_ROLES, otherwise=role),
        "token_ids": [*tokens.prompt_ids, *tokens.completion_ids],
        "mask": [*([False] * prompt), *map(bool, tokens.mask)],
        "logprobs": None if tokens.logprobs is None else [*([0.0] * prompt), *tokens.logprobs],
        "temperatures": None if tokens.temperatures is None else [*([1.0] * prompt), *tokens.temperatures],
        "env_name": record.task_name,
        "reward": record.total_reward,
        "task_index": record.task_index,
        "rollout_index": record.rollout_index,
        "path": path,
        "stop_reason": record.stop_reason,
        "model_version": None if versions is None else versions[0],
        "token_source": record.token_source,
        "sampling": sampling_text(record),
        **({} if record.tools is None else {"tools": record.tools}),
    }


@cache
def schema(calls: bool) -> pyarrow.Schema:
    """Columns of a Parquet file.

    Args:
        calls: With those of tools and calls.
    """
    import pyarrow as pa

    return pa.schema(
        [
            ("messages", pa.list_(message_type(calls))),
            ("token_ids", pa.list_(pa.int32())),
            ("mask", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(pa.float32())),
            ("temperatures", pa.list_(pa.float32())),
            ("env_name", pa.string()),
            ("reward", pa.float64()),
            ("task_index", pa.int64()),
            ("rollout_index", pa.int64()),
            ("path", pa.int32()),
            ("stop_reason", pa.string()),
            ("model_version", pa.int64()),
            ("token_source", pa.string()),
            ("sampling", pa.string()),
            *([("tools", pa.json_())] if calls else []),
        ]
    )


FORMAT = Format(name="prime-rl", containers=("parquet", "jsonl"), row=row, schema=schema, assumption=but_temperature)
