"""One message of a trajectory: text for people and environments, token ids for the policy."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kuberoll_workers.data.text import one_line

TOKEN_TYPE = "i"
"""`array` type code of token ids: 32-bit signed, which holds every vocabulary."""
LOGPROB_TYPE = "f"
"""`array` type code of log-probabilities: the engine computes them in float32."""

PROMPT_TURN = 0
"""Turn of the messages of a prompt."""

ANSWER_FIELDS = ("tool_call_id", "name")
"""Fields of a chat message that answers a tool call, besides role and content: the call's id, and the tool's name."""

THOUGHTS = "thoughts"
"""Field of a response's chat message: the number of characters of its content that are thoughts, tags included.

All of them, if the thoughts never end. Absent: the content has neither thoughts nor their tags.
"""
TRUNCATED = "truncated"
"""Field of a response's chat message: true if it was cut off at its length limit. Absent: it was not."""


def token_array(ids: Iterable[int] = ()) -> array[int]:
    """Token ids in memory: 4 bytes per token, sent without conversion."""
    return array(TOKEN_TYPE, ids)


@dataclass(slots=True)
class Message:
    """One message.

    Attributes:
        role: `system`, `user`, `assistant`, `environment`, `tool`, or another one of the dataset or environment.
        content: The text; for a response, its ids decoded without special tokens.
        token_ids: Ids of this message in the policy's context; only of its first part if an observation was cut to fit
            the window.
        logprobs: For a response: one log-probability per token id, under the distribution it was sampled from.
        turn: 0 in the prompt; k for response and observation of turn k, counted from 1.
        policy_versions: For a response: spans `(version, start, end)` over `token_ids`, end exclusive.
        truncated: The response hit its length limit, or the observation was cut to fit the window.
        sampled: True for a response: the policy's engine sampled its ids. Said where an engine's answer becomes a
            message, and by nothing else: of role `assistant` are also examples in a prompt, and what an environment or
            an agent wrote. Losses, exports and counts ask this alone.
    """

    role: str
    content: str
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    turn: int = 0
    policy_versions: Sequence[tuple[str, int, int]] | None = None
    truncated: bool = False
    sampled: bool = False


@dataclass(slots=True)
class ExtendedMessage(Message):
    """A message with further fields. Other messages do not store them.

    Attributes:
        fields: Further fields of the chat message, under their names in chat APIs: `tool_calls`, `text` beside them,
            `invalid_tool_calls` and `thoughts` of a response, `tool_call_id` of a tool's, or others of the dataset's
            row.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)


def check_authorship(messages: Sequence[Message], path: str = "", *, written: bool) -> None:
    """Check that messages to store, or stored ones, say which of them the policy sampled.

    A turn begins with its response, and has no other one; the prompt has none. Older versions wrote messages that do
    not say it: there this marks the message that begins a turn.

    Args:
        path: Where the messages are, for errors.
        written: False if older versions wrote them.

    Raises:
        ValueError: It is not clear which messages are responses; the message names the one in doubt.
    """
    turn = PROMPT_TURN
    for number, message in enumerate(messages):
        begins = message.turn > turn
        turn = message.turn
        if begins and not written:
            message.sampled = message.role == "assistant"
        if message.sampled is not begins or (message.logprobs is not None and not begins):
            raise ValueError(
                f"{path}messages[{number}], of turn {turn} and role {one_line(message.role, 40)!r}, is "
                f"{'' if message.sampled else 'not '}marked as sampled by the policy"
                f"{'' if message.logprobs is None else ' and has logprobs'}: each turn begins with its one response"
            )


def chat_message(message: Message) -> dict[str, Any]:
    """The message as chat APIs have it: `role`, `content` and further fields."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if isinstance(message, ExtendedMessage):
        chat.update(message.fields)
    if message.truncated and message.sampled:
        chat[TRUNCATED] = True
    return chat


def message_of(chat: Mapping[str, Any], token_ids: Sequence[int], *, turn: int = 0, truncated: bool = False) -> Message:
    """A chat message with its token ids."""
    role, content = chat["role"], chat["content"]
    if len(chat) == 2:
        return Message(role, content, token_ids, turn=turn, truncated=truncated)
    fields = {name: value for name, value in chat.items() if name not in ("role", "content")}
    return ExtendedMessage(role, content, token_ids, turn=turn, truncated=truncated, fields=fields)
