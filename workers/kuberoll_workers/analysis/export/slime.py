"""slime's format: the rollout data that `--load-debug-rollout-data` reads, samples in exact tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kuberoll_workers.analysis.export.chats import CHAT_ROLES
from kuberoll_workers.analysis.export.formats import Format
from kuberoll_workers.analysis.export.samplings import known_sampling, whole
from kuberoll_workers.analysis.export.views import (
    chat_with_calls,
    ground_truth,
    spoken,
    token_view,
)
from kuberoll_workers.data.messages import PROMPT_TURN
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.stop_reasons import is_cut


def row(record: TrajectoryRecord, role: str, path: int) -> dict[str, Any]:
    """Convert a trajectory to the fields of a `Sample`, in Python's own types.

    `weight_versions` has the version that each response began with. `metadata` has what slime has no field for; slime
    tells sources of samples apart by its `source_name`.
    """
    messages, tokens = spoken(record), token_view(record)
    prompt = [message for message in messages if message.turn == PROMPT_TURN]
    return {
        "group_index": record.task_index,
        "prompt": chat_with_calls(prompt, known=CHAT_ROLES, otherwise=role),
        "tokens": [*tokens.prompt_ids, *tokens.completion_ids],
        "response": "".join(message.content for message in messages[len(prompt) :]),
        "response_length": len(tokens.completion_ids),
        "label": ground_truth(record.metadata) or None,
        "reward": record.total_reward,
        "loss_mask": list(tokens.mask),
        "weight_versions": [
            message.policy_versions[0][0] for message in messages if message.sampled and message.policy_versions
        ],
        "rollout_log_probs": None if tokens.logprobs is None else list(tokens.logprobs),
        "status": "truncated" if is_cut(record.stop_reason) else "completed",
        "metadata": {
            "source_name": record.task_name,
            "task_index": record.task_index,
            "rollout_index": record.rollout_index,
            "path": path,
            "stop_reason": record.stop_reason,
            "policy_versions": tokens.policy_versions,
            "token_source": record.token_source,
            "sampling": known_sampling(record),
        },
    }


def document(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The content of a file: the samples of a rollout, those of a group together.

    `rollout_id` of a sample tells apart whose tokens are one rollout: the paths of a trajectory have the same one.
    """
    ordered = sorted(rows, key=lambda row: (*_key(row), row["metadata"]["path"]))
    rollouts = {key: number for number, key in enumerate(dict.fromkeys(map(_key, ordered)))}
    samples = [{**row, "index": place, "rollout_id": rollouts[_key(row)]} for place, row in enumerate(ordered)]
    return {"rollout_id": 0, "samples": samples}


def _key(row: dict[str, Any]) -> tuple[int, int]:
    return row["metadata"]["task_index"], row["metadata"]["rollout_index"]


FORMAT = Format(name="slime", containers=("pt",), row=row, document=document, assumption=whole)
