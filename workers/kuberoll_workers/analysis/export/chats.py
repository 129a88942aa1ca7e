"""Text-only formats: OpenAI's fine-tuning files and ShareGPT's conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from kuberoll_workers.analysis.export.formats import Format
from kuberoll_workers.analysis.export.samplings import sampling_text
from kuberoll_workers.analysis.export.views import chat, chat_with_calls, spoken
from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import TrajectoryRecord

CHAT_ROLES = frozenset({"system", "user", "assistant", "tool"})
_OPENAI_ROLES = frozenset({"system", "developer", "user", "assistant"})

_SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def openai_row(record: TrajectoryRecord, role: str, _path: int) -> dict[str, Any]:
    """`messages` only: the service rejects unknown keys.

    Examples in the prompt, and what another path of the trajectory teaches, get `weight` 0: only the policy's own
    messages are learned, each of them once. An answer to a call has the role `tool`, if there is a call of its id.
    """
    spoken_messages = spoken(record)
    rows = _openai_messages(spoken_messages, role)
    for message, row in zip(spoken_messages, rows, strict=True):
        if row["role"] == "assistant" and not message.sampled:
            row["weight"] = 0
    return {"messages": rows, **({} if record.tools is None else {"tools": record.tools})}


def _openai_messages(messages: Sequence[Message], role: str) -> list[dict[str, Any]]:
    rows = chat_with_calls(messages, known=_OPENAI_ROLES | {"tool"}, otherwise=role)
    called: set[Any] = set()
    for row in rows:
        for call in row.get("tool_calls", ()):
            called.add(call.get("id"))
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        if row["role"] == "tool":
            answers = row.pop("tool_call_id", None), row.pop("name", None)
            row |= {"role": role} if answers[0] not in called else {"tool_call_id": answers[0]}
    return rows


def sharegpt_row(record: TrajectoryRecord, role: str, path: int) -> dict[str, Any]:
    """`conversations` of `from` and `value`, in which the two sides alternate, as loaders require.

    What an assistant says right before a response, such as its beginning, is of the other side: joined with the
    response it would be learned.
    """
    conversation: list[dict[str, str]] = []
    said = spoken(record)
    for message, (own, follows) in zip(
        chat(said, known=CHAT_ROLES, otherwise=role), pairwise([*said, None]), strict=True
    ):
        begun = own is not None and not own.sampled and follows is not None and follows.sampled
        speaker = _SPEAKERS[role if begun and message["role"] == "assistant" else message["role"]]
        if conversation and _side(conversation[-1]["from"]) == _side(speaker):
            conversation[-1]["value"] += "\n\n" + message["content"]
        else:
            conversation.append({"from": speaker, "value": message["content"]})
    return {
        "id": f"{record.task_index}-{record.rollout_index}" + (f"-{path}" if path else ""),
        "conversations": conversation,
        "environment": record.task_name,
        "reward": record.total_reward,
        "sampling": sampling_text(record),
    }


def _side(speaker: str) -> str:
    return {"observation": "human"}.get(speaker, speaker)


OPENAI_CHAT = Format(name="openai-chat", containers=("jsonl",), row=openai_row, tool_role=False)
SHAREGPT = Format(name="sharegpt", containers=("jsonl",), row=sharegpt_row)
