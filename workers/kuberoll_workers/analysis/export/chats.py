"""Text-only formats: OpenAI's fine-tuning files and ShareGPT's conversations."""

from __future__ import annotations

from typing import Any

from kuberoll_workers.analysis.export.views import PROMPT_TURN, chat, spoken
from kuberoll_workers.data.record import TrajectoryRecord

CHAT_ROLES = frozenset({"system", "user", "assistant", "tool"})
_OPENAI_ROLES = frozenset({"system", "developer", "user", "assistant"})

_SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def openai_row(record: TrajectoryRecord, role: str) -> dict[str, Any]:
    """`messages` only: the service rejects unknown keys.

    Examples in the prompt get `weight` 0, so that only the policy's own messages are learned.
    """
    spoken_messages = spoken(record)
    rows = chat(spoken_messages, known=_OPENAI_ROLES, otherwise=role)
    for message, row in zip(spoken_messages, rows, strict=True):
        if row["role"] == "assistant" and message.turn == PROMPT_TURN:
            row["weight"] = 0
    return {"messages": rows}


def sharegpt_row(record: TrajectoryRecord, role: str) -> dict[str, Any]:
    """`conversations` of `from` and `value`, in which the two sides alternate, as loaders require."""
    conversation: list[dict[str, str]] = []
    for message in chat(spoken(record), known=CHAT_ROLES, otherwise=role):
        speaker = _SPEAKERS[message["role"]]
        if conversation and _side(conversation[-1]["from"]) == _side(speaker):
            conversation[-1]["value"] += "\n\n" + message["content"]
        else:
            conversation.append({"from": speaker, "value": message["content"]})
    return {
        "id": f"{record.task_index}-{record.rollout_index}",
        "conversations": conversation,
        "environment": record.task_name,
        "reward": record.total_reward,
    }


def _side(speaker: str) -> str:
    return {"observation": "human"}.get(speaker, speaker)
