"""SkyRL's formats: a pretokenized row for its SFT, and the fields of a `GeneratorOutput`, in exact tokens."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from kuberoll_workers.analysis.export.formats import Format
from kuberoll_workers.analysis.export.samplings import sampling_text, whole
from kuberoll_workers.analysis.export.views import token_view
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.stop_reasons import is_cut

if TYPE_CHECKING:
    import pyarrow


def row(record: TrajectoryRecord, _role: str, path: int) -> dict[str, Any]:
    """Convert a trajectory to a row.

    `input_ids` and `loss_mask` are over the whole sequence, as SkyRL's pretokenized datasets are. The columns from
    `prompt_token_ids` to `rollout_logprobs` have the names of a `GeneratorOutput`, whose lists they make up.
    """
    tokens = token_view(record)
    return {
        "input_ids": [*tokens.prompt_ids, *tokens.completion_ids],
        "loss_mask": [*([0] * len(tokens.prompt_ids)), *tokens.mask],
        "prompt_token_ids": tokens.prompt_ids,
        "response_ids": tokens.completion_ids,
        "rewards": record.total_reward,
        "loss_masks": tokens.mask,
        # As of its engines: `stop`, or `length` where the trajectory was cut.
        "stop_reasons": "length" if is_cut(record.stop_reason) else "stop",
        "rollout_logprobs": tokens.logprobs,
        "instance_id": str(record.task_index),
        "repetition_id": record.rollout_index,
        "path": path,
        "policy_versions": tokens.policy_versions,
        "token_source": record.token_source,
        "sampling": sampling_text(record),
        "environment": record.task_name,
    }


@cache
def schema(_calls: bool) -> pyarrow.Schema:
    """Columns of a Parquet file, the same with calls."""
    import pyarrow as pa

    ids, bits, text = pa.list_(pa.int32()), pa.list_(pa.int8()), pa.string()
    return pa.schema(
        [
            ("input_ids", ids),
            ("loss_mask", bits),
            ("prompt_token_ids", ids),
            ("response_ids", ids),
            ("rewards", pa.float64()),
            ("loss_masks", bits),
            ("stop_reasons", text),
            ("rollout_logprobs", pa.list_(pa.float32())),
            ("instance_id", text),
            ("repetition_id", pa.int64()),
            ("path", pa.int32()),
            ("policy_versions", pa.list_(text)),
            ("token_source", text),
            ("sampling", text),
            ("environment", text),
        ]
    )


FORMAT = Format(name="skyrl", containers=("parquet", "jsonl"), row=row, schema=schema, assumption=whole)
