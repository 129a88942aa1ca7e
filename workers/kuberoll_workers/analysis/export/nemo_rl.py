"""NeMo RL: a finished rollout's row with its message log in exact tokens, and `messages` for its chat datasets."""

from __future__ import annotations

from typing import Any

import orjson

from kuberoll_workers.analysis.export.chats import CHAT_ROLES
from kuberoll_workers.analysis.export.views import chat, is_response, spoken
from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import TrajectoryRecord


def row(record: TrajectoryRecord, role: str) -> dict[str, Any]:
    """One row.

    `message_log` is whole, with the environment's own role and its last observation; `messages` ends with the last
    response, as the loader of chat data asserts.
    """
    said = spoken(record)
    return {
        "message_log": [_log_message(message) for message in record.messages],
        "total_reward": record.total_reward,
        "loss_multiplier": 1.0,
        "length": sum(len(message.token_ids) for message in record.messages),
        "truncated": record.stop_reason == "truncated",
        "stop_reason": record.stop_reason,
        "task_name": record.task_name,
        # Samples of one prompt have the same one, as NeMo RL repeats them.
        "idx": record.task_index,
        "rollout_index": record.rollout_index,
        # Any JSON, of another form in each environment: `datasets` gives a column one form only.
        "extra_env_info": orjson.dumps(record.metadata).decode(),
        "messages": chat(said, known=CHAT_ROLES, otherwise=role),
        "message_loss_mask": [int(is_response(message)) for message in said],
    }


def _log_message(message: Message) -> dict[str, Any]:
    ids = message.token_ids
    return {
        "role": message.role,
        "content": message.content,
        "token_ids": ids,
        # Zeros where nothing was generated, as NeMo RL fills them in before training; none where none are known.
        "generation_logprobs": message.logprobs if is_response(message) else [0.0] * len(ids),
        "token_loss_mask": [int(is_response(message))] * len(ids),
    }
