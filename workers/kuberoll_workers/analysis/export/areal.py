"""AReaL's format: the fields of the tensor dictionary that a rollout workflow returns, in exact tokens."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from kuberoll_workers.analysis.export.formats import Format
from kuberoll_workers.analysis.export.samplings import sampling_text, whole
from kuberoll_workers.analysis.export.views import token_view
from kuberoll_workers.data.record import TrajectoryRecord

if TYPE_CHECKING:
    import pyarrow

NOT_GENERATED = -1
"""Version of a token that the policy did not generate."""


def row(record: TrajectoryRecord, _role: str, path: int) -> dict[str, Any]:
    """Convert a trajectory to a row.

    Everything but `rewards` is over the whole sequence: prompt, responses, and what the environment said. `versions` is
    null if one of them is not a whole number.
    """
    tokens = token_view(record)
    prompt = len(tokens.prompt_ids)
    versions = None
    if tokens.version_range() is not None:
        numbers = [NOT_GENERATED if version is None else int(version) for version in tokens.policy_versions]
        versions = [NOT_GENERATED] * prompt + numbers
    return {
        "input_ids": [*tokens.prompt_ids, *tokens.completion_ids],
        "attention_mask": [True] * (prompt + len(tokens.completion_ids)),
        "loss_mask": [*([0] * prompt), *tokens.mask],
        "logprobs": None if tokens.logprobs is None else [*([0.0] * prompt), *tokens.logprobs],
        "rewards": record.total_reward,
        "versions": versions,
        "token_source": record.token_source,
        "sampling": sampling_text(record),
        "environment": record.task_name,
        "task_index": record.task_index,
        "rollout_index": record.rollout_index,
        "path": path,
    }


@cache
def schema(_calls: bool) -> pyarrow.Schema:
    """Columns of a Parquet file, the same with calls."""
    import pyarrow as pa

    return pa.schema(
        [
            ("input_ids", pa.list_(pa.int32())),
            ("attention_mask", pa.list_(pa.bool_())),
            ("loss_mask", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("rewards", pa.float64()),
            ("versions", pa.list_(pa.int64())),
            ("token_source", pa.string()),
            ("sampling", pa.string()),
            ("environment", pa.string()),
            ("task_index", pa.int64()),
            ("rollout_index", pa.int64()),
            ("path", pa.int32()),
        ]
    )


FORMAT = Format(name="areal", containers=("parquet", "jsonl"), row=row, schema=schema, assumption=whole)
