"""Chat messages as items of OpenAI's Responses API, as NeMo Gym has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kuberoll_workers.data.messages import THOUGHTS
from kuberoll_workers.data.thoughts import PLAIN, thoughts_end
from kuberoll_workers.data.tools import Tool
from kuberoll_workers.environments.interface import ChatMessage


def input_items(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Input items of a prompt."""
    items: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            items.append(_output(message))
            continue
        if message["content"] or not message.get("tool_calls"):
            items.append({"type": "message", "role": message["role"], "content": message["content"]})
        items.extend(map(_call, message.get("tool_calls") or ()))
    return items


def output_items(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Output items of a policy's turns: reasoning, messages, function calls, and the answers of tools.

    Thoughts are reasoning, also if the prompt has opened them, or they never end.
    """
    return list(_outputs(messages))


def _outputs(messages: Sequence[ChatMessage]) -> Iterator[dict[str, Any]]:
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            yield _output(message)
        if message["role"] != "assistant":
            continue
        calls = message.get("tool_calls") or ()
        # Beside its calls: these are items of their own.
        content: str = message["text"] if calls and "text" in message else message["content"]
        thoughts = message.get(THOUGHTS)
        end = thoughts_end(content, opened=None if thoughts is None else thoughts > 0)
        text = content[end:]
        if end:
            thought = content[:end].strip().removeprefix(PLAIN.opening).removesuffix(PLAIN.closing).strip()
            summary = [{"type": "summary_text", "text": thought}]
            yield {"type": "reasoning", "id": f"rs_{number}", "summary": summary}
        if text.strip() or not calls:
            part = {"type": "output_text", "text": text.lstrip() if end else text, "annotations": []}
            yield {
                "type": "message",
                "id": f"msg_{number}",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        yield from map(_call, calls)


def response_of(output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A complete response with these output items."""
    return {
        "id": "resp_0",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "status": "completed",
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def tool_items(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools in the form of the Responses API, whose function has no object of its own."""
    return [{"type": "function", "parameters": {}, "strict": False, **tool["function"]} for tool in tools]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "function_call",
        "call_id": call.get("id"),
        "name": function["name"],
        "arguments": function["arguments"],
    }


def _output(message: ChatMessage) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": message["content"]}
