"""NeMo RL's format: a rollout with its message log in exact tokens, and `messages` for its chat datasets."""

from __future__ import annotations

from typing import Any

import orjson

from kuberoll_workers.analysis.export.chats import CHAT_ROLES
from kuberoll_workers.analysis.export.formats import Format
from kuberoll_workers.analysis.export.samplings import sampling_text, whole
from kuberoll_workers.analysis.export.views import chat_with_calls, spoken, token_versions, token_view
from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.stop_reasons import is_cut


def row(record: TrajectoryRecord, role: str, path: int) -> dict[str, Any]:
    """Convert a trajectory to a row.

    `message_log` is complete, with the environment's own role and its last observation; `messages` ends with the last
    response, which the loader of chat data requires. `weight_version` is that of the replay buffer: the oldest version
    that sampled a token.
    """
    messages = spoken(record)
    versions = token_view(record).version_range()
    return {
        "message_log": [_log_message(message) for message in record.messages],
        "total_reward": record.total_reward,
        "loss_multiplier": 1.0,
        "length": sum(len(message.token_ids) for message in record.messages),
        "truncated": is_cut(record.stop_reason),
        "stop_reason": record.stop_reason,
        "task_name": record.task_name,
        # Equal for all samples of a prompt, as in NeMo RL.
        "idx": record.task_index,
        "task_index": record.task_index,
        "rollout_index": record.rollout_index,
        "path": path,
        "weight_version": None if versions is None else versions[0],
        "token_source": record.token_source,
        "sampling": sampling_text(record),
        # JSON whose form depends on the environment, as text: in `datasets` a column has a single type.
        "extra_env_info": orjson.dumps(record.metadata).decode(),
        "messages": chat_with_calls(messages, known=CHAT_ROLES, otherwise=role),
        "message_loss_mask": [int(message.sampled) for message in messages],
        **({} if record.tools is None else {"tools": record.tools}),
    }


def _log_message(message: Message) -> dict[str, Any]:
    ids = message.token_ids
    return {
        "role": message.role,
        "content": message.content,
        "token_ids": ids,
        # Zeros for tokens that were not generated, as NeMo RL fills them in before training; None if they are unknown.
        "generation_logprobs": message.logprobs if message.sampled else [0.0] * len(ids),
        "token_loss_mask": [int(message.sampled)] * len(ids),
        "policy_versions": token_versions(message),
    }


FORMAT = Format(name="nemo-rl", containers=("jsonl",), row=row, assumption=whole)
