"""Views of a trajectory as text and as tokens, from which all formats are made."""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kuberoll_workers.analysis.paths import until_last_response
from kuberoll_workers.data.messages import (
    ANSWER_FIELDS,
    LOGPROB_TYPE,
    PROMPT_TURN,
    TOKEN_TYPE,
    ExtendedMessage,
    Message,
)
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.tool_calls import parse_tool_calls
from kuberoll_workers.data.tools import template_messages

_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """Tokens of a trajectory from its prompt to its last generated one; later observations teach nothing.

    Attributes:
        prompt_ids: The prompt as the policy saw it.
        completion_ids: Responses and the observations between them, concatenated.
        mask: 1 for each of `completion_ids` that the policy generated, else 0.
        logprobs: Log-probability of each of `completion_ids`, 0.0 if the policy did not generate it; None if a response
            has none.
        policy_versions: Version of the weights that sampled each of `completion_ids`; None for a token that the policy
            did not generate, or whose version is unknown.
        temperatures: By which the logits of each of `completion_ids` were divided, 1.0 if the policy did not generate
            it; None if that of a response is unknown, or a response is greedy.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float] | None
    policy_versions: Sequence[str | None]
    temperatures: Sequence[float] | None

    def version_range(self) -> tuple[int, int] | None:
        """Oldest and newest version as numbers; None if one is unknown or not a whole number of at most 18 digits."""
        generated = {version for version, own in zip(self.policy_versions, self.mask, strict=True) if own}
        numbers = [int(version) for version in generated if version is not None and _NUMBER.fullmatch(version)]
        if not numbers or len(numbers) < len(generated):
            return None
        return min(numbers), max(numbers)


def responses(record: TrajectoryRecord) -> int:
    """Number of messages that the policy generated."""
    return sum(message.sampled for message in record.messages)


def token_view(record: TrajectoryRecord) -> TokenView:
    """Token view of a trajectory with the `sampling` of each response."""
    prompt, completion = array(TOKEN_TYPE), array(TOKEN_TYPE)
    mask: array[int] = array("b")
    logprobs: array[float] = array(LOGPROB_TYPE)
    temperatures: array[float] = array("d")
    versions: list[str | None] = []
    known = True
    sampling = iter(record.sampling or ())
    for message in spoken(record):
        ids = message.token_ids
        if message.turn == PROMPT_TURN:
            prompt.extend(ids)
            continue
        completion.extend(ids)
        mask.extend([int(message.sampled)] * len(ids))
        if message.sampled and message.logprobs is None:
            known = False
        logprobs.extend(message.logprobs or [0.0] * len(ids))
        versions.extend(token_versions(message))
        distribution = next(sampling, None) if message.sampled else None
        temperature = 0.0 if distribution is None else distribution["temperature"]
        temperatures.extend([temperature if message.sampled else 1.0] * len(ids))
    return TokenView(
        prompt_ids=prompt,
        completion_ids=completion,
        mask=mask,
        logprobs=logprobs if known else None,
        policy_versions=versions,
        temperatures=temperatures if all(temperatures) else None,
    )


def token_versions(message: Message) -> list[str | None]:
    """Policy version of each token of a message; None for those of which no span says it."""
    versions: list[str | None] = [None] * len(message.token_ids)
    if message.sampled:
        for version, start, end in message.policy_versions or ():
            versions[start:end] = [version] * len(versions[start:end])
    return versions


def spoken(record: TrajectoryRecord) -> list[Message]:
    """Messages up to the last response, or all if there is none."""
    return until_last_response(record.messages)


def chat(messages: Sequence[Message], *, known: Collection[str], otherwise: str) -> list[dict[str, Any]]:
    """Chat messages with role and content: the whole text of a response, with its calls.

    Args:
        known: Roles that stay unchanged.
        otherwise: Role of all other messages, such as an environment's. After the prompt that is also the role of what
            an environment or an agent said as an assistant: loaders of chat data learn every assistant's message.
    """
    return [
        {
            "role": message.role if message.role in known and not _foreign(message) else otherwise,
            "content": message.content,
        }
        for message in messages
    ]


def _foreign(message: Message) -> bool:
    return message.role == "assistant" and not message.sampled and message.turn > PROMPT_TURN


def chat_with_calls(messages: Sequence[Message], *, known: Collection[str], otherwise: str) -> list[dict[str, Any]]:
    """Chat messages with calls of tools as `tool_calls`, in the form of chat templates: with objects as arguments.

    A message without calls has role and content only. The content of one with calls is the text beside them, so that a
    template which writes both has the response again.

    Args:
        known, otherwise: See `chat`.
    """
    rows = chat(messages, known=known, otherwise=otherwise)
    return [{**row, **_call_fields(message)} for message, row in zip(messages, rows, strict=True)]


def has_calls(record: TrajectoryRecord) -> bool:
    """True if a trajectory has tools, calls or answers to calls."""
    return record.tools is not None or any(_call_fields(message) for message in record.messages)


def _call_fields(message: Message) -> dict[str, Any]:
    if not isinstance(message, ExtendedMessage):
        return {}
    fields = {name: message.fields[name] for name in ANSWER_FIELDS if name in message.fields}
    if message.role == "tool" and fields:
        return fields
    if not (calls := message.fields.get("tool_calls")):
        return {}
    return {
        "content": _text_beside_calls(message),
        "tool_calls": template_messages([{"tool_calls": calls}])[0]["tool_calls"],
    }


def _text_beside_calls(message: ExtendedMessage) -> str:
    text = message.fields.get("text")
    if text is None:
        if not message.sampled:
            return message.content
        # Of an older run.
        text = parse_tool_calls(message.content).text
    # Templates write the white space before a call.
    return message.content if text is None else str(text).rstrip()


GROUND_TRUTHS = ("ground_truth", "expected_answer", "answer")
"""Keys of an episode's state that may hold the right answer."""


def ground_truth(metadata: Mapping[str, Any] | None) -> str:
    """The right answer as text; empty if the state has none."""
    value = next((metadata[key] for key in GROUND_TRUTHS if key in metadata), None) if metadata else None
    return "" if value is None else str(value)
