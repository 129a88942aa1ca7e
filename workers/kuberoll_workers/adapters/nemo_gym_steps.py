"""Servers of NeMo Gym with `/reset` and `/step`, as its gymnasium_agent drives them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson

from kuberoll_workers.adapters.http import Answer
from kuberoll_workers.data.response_items import input_items, output_items, response_of, tool_items
from kuberoll_workers.environments.interface import ChatMessage, Episode, EpisodeEnd, EpisodeStart
from kuberoll_workers.environments.tools import unreadable_answer

_STATE = "nemo_gym"

Post = Callable[[str, Any, Mapping[str, str]], Awaitable[Answer]]
"""Sends a value to an endpoint with cookies; the answer is good."""


class SteppedEpisodes:
    """Episodes that the server steps: each response is one `/step`, whose reward is that of the turn.

    Episode state, beside the row's fields, in `nemo_gym`: `cookies` of the session, `prompt`, the number of the row's
    messages, `tools`, the row's as items of the Responses API, `turn`, `close` and `idempotent`, what the server says
    that it supports, and at the end `terminated`, `truncated` and `info` of the server.
    """

    def __init__(self, post: Post) -> None:
        self._post = post

    async def begin(self, episode: Episode) -> EpisodeStart:
        """Reset the server; its observation follows the row's prompt, as the user's message.

        Raises:
            UnusableRow: The server refuses the row's fields.
            ServerError: It cannot be reached, or failed.
        """
        row = dict(episode.metadata or {})
        tools = None if episode.tools is None else tool_items(episode.tools)
        answer = await self._post("reset", {**row, **_params(episode.messages, tools)}, {})
        result = _object(answer)
        info = result.get("info") or {}
        state = {
            "cookies": dict(answer.cookies),
            "prompt": len(episode.messages),
            "tools": tools,
            "turn": 0,
            "close": info.get("supports_explicit_close") is True,
            "idempotent": info.get("supports_step_idempotency") is True,
            "episode": episode.id,
        }
        shown = result.get("observation")
        return EpisodeStart(
            messages=[{"role": "user", "content": shown}] if shown else [], metadata={**row, _STATE: state}
        )

    async def turn(self, log: Sequence[ChatMessage], metadata: Mapping[str, Any]) -> tuple[Any, Any, float, bool]:
        """Step the server with the newest response.

        Returns:
            Observation, state, reward, and whether the episode has ended.

        Raises:
            UnusableRow: The server refuses the row's fields.
            ServerError: It cannot be reached, or failed.
        """
        state = metadata[_STATE]
        row = {name: value for name, value in metadata.items() if name != _STATE}
        request = {
            **row,
            **_params(log[: state["prompt"]], state["tools"]),
            "response": response_of(output_items([log[-1]])),
        }
        if state["idempotent"]:
            request["_ng_step_request_id"] = f"{state['episode']}-{state['turn']}"
        answer = await self._post("step", request, state["cookies"])
        result = _object(answer)
        reward = result.get("reward", 0.0)
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise answer.error()
        ends = {name: result.get(name) is True for name in ("terminated", "truncated")}
        over = any(ends.values())
        info = result.get("info") or {}
        state = {**state, "cookies": dict(answer.cookies), "turn": state["turn"] + 1}
        if over:
            return _NOTHING, {**metadata, _STATE: {**state, **ends, "info": info}}, float(reward), True
        return _observation(log[-1], result.get("observation"), info), {**metadata, _STATE: state}, float(reward), False

    async def close(self, episode: EpisodeEnd) -> None:
        """End the episode at a server that can be told so."""
        state = (episode.metadata or {}).get(_STATE)
        if state is not None and state["close"]:
            await self._post("close", {}, state["cookies"])


_NOTHING: Mapping[str, str] = {"role": "environment", "content": ""}


def _observation(reply: ChatMessage, shown: Any, info: Mapping[str, Any]) -> Any:
    """Answers to calls, and the observation as the user's message."""
    names = {call["id"]: call["function"]["name"] for call in reply.get("tool_calls") or ()}
    messages = [
        {
            "role": "tool",
            "tool_call_id": output["call_id"],
            **({"name": names[output["call_id"]]} if output["call_id"] in names else {}),
            "content": _text(output["output"]),
        }
        for output in info.get("tool_outputs") or ()
    ]
    messages += map(unreadable_answer, reply.get("invalid_tool_calls") or ())
    if shown:
        messages.append({"role": "user", "content": shown})
    return messages or _NOTHING


def _text(output: Any) -> str:
    return output if isinstance(output, str) else orjson.dumps(output).decode()


def _params(messages: Sequence[ChatMessage], tools: Sequence[Any] | None) -> dict[str, Any]:
    params = {"input": input_items(messages), **({} if tools is None else {"tools": tools})}
    return {"responses_create_params": params}


def _object(answer: Answer) -> dict[str, Any]:
    result = answer.json()
    if not isinstance(result, dict):
        raise answer.error()
    return result
