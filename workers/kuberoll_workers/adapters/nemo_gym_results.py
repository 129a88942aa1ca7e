"""Results of rollouts by NeMo Gym: failures, rewards, and the calls of the policy in a response's items."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kuberoll_workers.data.gym_requests import FAILURE, TERMINAL
from kuberoll_workers.data.messages import LOGPROB_TYPE, token_array
from kuberoll_workers.data.plain import is_finite, repr_of
from kuberoll_workers.data.response_items import InvalidItem, messages_of_items
from kuberoll_workers.environments.interface import ChatMessage
from kuberoll_workers.environments.outcome import EnvironmentFault, RowFault, StepInvalid

TOKEN_FIELDS: Final = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""Fields of the last item of a call: what the policy read, what it sampled, and the log-probabilities of that."""

_NO_TOKENS: Final = (
    "NeMo Gym's answer has no token ids (generation_token_ids in response.output), so there is nothing to learn from: "
    "set return_token_id_information: true in the configuration of Gym's model server, which must be one that can, "
    "such as vllm_model"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GymCall:
    """One call of the policy in a response.

    Attributes:
        item: Number of the item with its token ids, the last of the call.
        first: Number of its first item.
        prompt, response: Ids that were read and sampled.
        logprobs: One for each sampled id.
    """

    item: int
    first: int
    prompt: array[int]
    response: array[int]
    logprobs: array[float]


def reported_failure(result: Mapping[str, Any]) -> EnvironmentFault | None:
    """The failure that a result reports; None if it reports none.

    Such a result has a reward of 0, which would be trained on as a wrong answer.
    """
    if (failure := result.get(FAILURE)) is None:
        return None
    words = f"NeMo Gym reports a failed rollout: {failure}"
    return RowFault(words) if result.get(TERMINAL) else StepInvalid(words)


def reward_of(result: Mapping[str, Any], where: str) -> float:
    """The reward of a result.

    Raises:
        StepInvalid: It is no finite number.
    """
    reward = result.get("reward")
    if not is_finite(reward):
        raise StepInvalid(f"{where}.reward must be a finite number; found {repr_of(reward)}")
    return float(reward)


def reward_components(result: Mapping[str, Any]) -> dict[str, float]:
    """The components of a result's reward by name; none if it names none.

    Raises:
        AttributeError, OverflowError, TypeError, ValueError: They are no numbers.
    """
    return {str(name): float(score) for name, score in (result.get("reward_components") or {}).items()}


def check_components(result: Mapping[str, Any], reward: float, where: str) -> dict[str, float]:
    """The components of a result's reward, whose sum is the reward.

    Raises:
        StepInvalid: They are no numbers, or have another sum.
    """
    try:
        components = reward_components(result)
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise StepInvalid(f"{where}.reward_components must be numbers by name: {error}") from error
    total = sum(components.values())
    # NeMo RL's tolerance.
    if components and not math.isclose(reward, total, rel_tol=1e-5, abs_tol=1e-6):
        raise StepInvalid(f"{where}.reward is {reward} but its reward_components sum to {total}")
    return components


def is_cut(result: Mapping[str, Any]) -> bool:
    """True if the last response of a result was cut off by a limit of its length."""
    details = (result.get("response") or {}).get("incomplete_details") or {}
    return bool(details.get("reason") == "max_output_tokens")


def calls_of(result: Mapping[str, Any]) -> list[GymCall]:
    """The calls of the policy in a result's response, in their order; those that sampled nothing are left out.

    The items of a call follow each other, and the last has its ids: so do Gym's model servers.

    Raises:
        StepInvalid: There is none with token ids, or one has invalid ones; the message names the field.
        RowFault: The first prompt did not fit the policy's window.
    """
    items = output_of(result)
    calls, after = [], 0
    for number, item in enumerate(items):
        if not isinstance(item, Mapping) or item.get("generation_token_ids") is None:
            continue
        first = number
        while first > after and is_of_model(items[first - 1]):
            first -= 1
        prompt, response, logprobs = _tokens(item, f"response.output[{number}]")
        if response:
            calls.append(GymCall(item=number, first=first, prompt=prompt, response=response, logprobs=logprobs))
        after = number + 1
    if calls:
        return calls
    if is_cut(result) and not any(_says(item) for item in items):
        raise RowFault("the policy sampled nothing: the row's prompt does not fit its window (max_output_tokens)")
    raise StepInvalid(_NO_TOKENS)


def output_of(result: Mapping[str, Any]) -> Sequence[Any]:
    """Output items of a result's response.

    Raises:
        StepInvalid: It has none.
    """
    response = result.get("response")
    items = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(items, list):
        raise StepInvalid(f"response.output must be a list of items; found {repr_of(items)}")
    return items


def is_of_model(item: Any) -> bool:
    """True for an item that a model said."""
    if not isinstance(item, Mapping):
        return False
    kind = item.get("type")
    return kind in ("reasoning", "function_call") or (kind in (None, "message") and item.get("role") == "assistant")


def tool_calls_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Calls of tools among the items of a model, in the form of chat messages."""
    return [
        {
            # Without one, agents get that of their turn.
            **({} if item.get("call_id") is None else {"id": item["call_id"]}),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        for item in items
        if isinstance(item, Mapping) and item.get("type") == "function_call"
    ]


def chats_of(items: Sequence[Any]) -> list[ChatMessage] | None:
    """Chat messages of items that were read, with text content; None: an item has no counterpart in a chat."""
    try:
        messages = messages_of_items(items, "items")
    except InvalidItem:
        return None
    chats = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return None
        text = _text(message.get("content"))
        if text is None:
            return None
        chats.append({**message, "content": text})
    return chats


def without_tokens(response: Mapping[str, Any]) -> dict[str, Any]:
    """A response whose items have no token ids and log-probabilities."""
    items = [
        {name: value for name, value in item.items() if name not in TOKEN_FIELDS} if isinstance(item, Mapping) else item
        for item in response["output"]
    ]
    return {**response, "output": items}


def _tokens(item: Mapping[str, Any], where: str) -> tuple[array[int], array[int], array[float]]:
    prompt, response = (_ids(item.get(name), f"{where}.{name}") for name in TOKEN_FIELDS[:2])
    field = f"{where}.{TOKEN_FIELDS[2]}"
    try:
        logprobs = array(LOGPROB_TYPE, item.get(TOKEN_FIELDS[2]) or ())
    except (TypeError, OverflowError) as error:
        raise StepInvalid(f"{field}: {error}") from error
    if len(logprobs) != len(response):
        raise StepInvalid(f"{field}: found {len(logprobs)} for {len(response)} token ids")
    if not math.isfinite(sum(logprobs)):
        raise StepInvalid(f"{field}: one is not a finite number")
    return prompt, response, logprobs


def _ids(given: Any, where: str) -> array[int]:
    try:
        # Gym's own server writes sampled ids as texts where its models let it.
        numbers = [int(value) for value in given] if given and isinstance(given[0], str) else given
        ids = token_array(numbers)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise StepInvalid(f"{where} must be token ids; found {repr_of(given)}") from error
    if ids and min(ids) < 0:
        raise StepInvalid(f"{where}: found {min(ids)}; token ids are not negative")
    return ids


def _says(item: Any) -> bool:
    return bool(not isinstance(item, Mapping) or item.get("type") == "function_call" or _text(item.get("content")))


def _text(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None
