"""Messages of a request to any of the APIs, in OpenAI's form: what a session's trajectories show to people."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from kuberoll_workers.data.tools import Tool, ToolCall
from kuberoll_workers.serving.openai_api.exchange import ChatMessage

_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict")


def chat_of(path: str, body: Mapping[str, Any]) -> list[ChatMessage] | None:
    """The messages of a request; None if it has none, as one with a plain prompt.

    Args:
        path: Its path, such as `/v1/chat/completions`.
    """
    if path == "/v1/chat/completions":
        return list(_messages(body.get("messages")))
    if path == "/v1/responses":
        return [*_system(body.get("instructions")), *_items(body.get("input"))]
    if path == "/v1/messages":
        return [*_system(body.get("system")), *_anthropic(body.get("messages"))]
    return None


def tools_of(path: str, body: Mapping[str, Any]) -> list[Tool]:
    """The functions that a request declares as tools; not the tools of a server's own, which no engine here has.

    Args:
        path: Its path, such as `/v1/chat/completions`.
    """
    return [] if path == "/v1/completions" else list(_functions(body.get("tools")))


def repeated_calls(chat: Sequence[ChatMessage], before: int) -> list[ToolCall]:
    """Calls of tools in the response that a request continues, as its caller repeats them: with their ids.

    Args:
        before: As for `added_messages`.
    """
    response = itertools.takewhile(lambda message: message["role"] == "assistant", chat[before:])
    calls = [call for message in response for call in message.get("tool_calls") or ()]
    return [
        call for call in calls if isinstance(call, dict) and call.get("id") and isinstance(call.get("function"), dict)
    ]


def added_messages(chat: Sequence[ChatMessage], before: int) -> list[ChatMessage]:
    """Messages that a request has after those of the one that it continues, and after the response to that.

    Args:
        before: Number of messages of the one that it continues.
    """
    added = list(chat[before:])
    while added and added[0]["role"] == "assistant":
        del added[0]
    return added


def _functions(tools: Any) -> Iterator[Tool]:
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict):
            continue
        # Anthropic's functions have no type, or `custom`.
        if "input_schema" in tool:
            function = {**tool, "parameters": tool["input_schema"]}
        elif tool.get("type") == "function":
            function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        else:
            continue
        fields = {name: function[name] for name in _FUNCTION_FIELDS if function.get(name) is not None}
        yield {"type": "function", "function": fields}


def _system(value: Any) -> Iterator[ChatMessage]:
    if text := _text(value):
        yield {"role": "system", "content": text}


def _messages(messages: Any) -> Iterator[ChatMessage]:
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        chat: ChatMessage = {"role": str(message.get("role") or "user"), "content": _text(message.get("content"))}
        for name in ("tool_calls", "tool_call_id", "name"):
            if message.get(name):
                chat[name] = message[name]
        yield chat


def _items(items: Any) -> Iterator[ChatMessage]:
    if isinstance(items, str):
        yield {"role": "user", "content": items}
        return
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        kind = item.get("type", "message")
        if kind == "function_call_output":
            yield _answer(item.get("call_id"), item.get("output"))
        elif kind == "function_call":
            call = _call(item.get("call_id"), item.get("name"), str(item.get("arguments") or "{}"))
            yield {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind == "message":
            yield {"role": str(item.get("role") or "user"), "content": _text(item.get("content"))}
        else:
            # Reasoning, and whatever else the model itself has written.
            yield {"role": "assistant", "content": ""}


def _anthropic(messages: Any) -> Iterator[ChatMessage]:
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        yield from (
            _answer(item.get("tool_use_id"), item.get("content")) for item in blocks if _is(item, "tool_result")
        )
        calls = [
            _call(item.get("id"), item.get("name"), msgspec.json.encode(item.get("input") or {}).decode())
            for item in blocks
            if _is(item, "tool_use")
        ]
        text = content if isinstance(content, str) else _text([item for item in blocks if _is(item, "text")])
        if text or calls or not blocks:
            chat: ChatMessage = {"role": str(message.get("role") or "user"), "content": _text(text)}
            yield {**chat, "tool_calls": calls} if calls else chat


def _is(block: Mapping[str, Any], kind: str) -> bool:
    return block.get("type") == kind


def _answer(call: Any, output: Any) -> ChatMessage:
    return {"role": "tool", "tool_call_id": str(call or ""), "content": _text(output)}


def _call(identity: Any, name: Any, arguments: str) -> dict[str, Any]:
    function = {"name": str(name or ""), "arguments": arguments}
    return {"id": str(identity or ""), "type": "function", "function": function}


def _text(value: Any) -> str:
    """The text of a content: itself, or its parts one after the other; other parts as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_part, value))
    return "" if value is None else msgspec.json.encode(value).decode()


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return _text(part) if isinstance(part, str | list) else msgspec.json.encode(part).decode()
