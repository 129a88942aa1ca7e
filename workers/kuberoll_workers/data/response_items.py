"""Items of OpenAI's Responses API, as NeMo Gym has them, as chat messages, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kuberoll_workers.data.messages import THOUGHTS
from kuberoll_workers.data.plain import repr_of
from kuberoll_workers.data.thoughts import PLAIN, thoughts_end
from kuberoll_workers.data.tools import Tool

_MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
_TEXTS = ("summary_text", "reasoning_text", "text")


class InvalidItem(ValueError):
    """An item has no counterpart in a chat; the message begins with its place."""


def messages_of_items(items: Sequence[Any], where: str) -> list[Any]:
    """Chat messages of input items.

    What the model said in one turn is one message: the assistant's `message`, `reasoning` and `function_call` that
    follow each other. Reasoning becomes text between `<think>` and `</think>`, as NeMo Gym has it; encrypted
    reasoning has no text and is left out. A `function_call_output` is a message of the role `tool`.

    Args:
        where: Name of the list for errors.

    Returns:
        The messages; their fields are not checked.

    Raises:
        InvalidItem: An item is of another type, such as an image or a call of a hosted tool.
    """
    return list(_messages(items, where))


@dataclass(slots=True)
class _Turn:
    """What the model said in one turn."""

    texts: list[Any] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    begun: bool = False

    def message(self) -> dict[str, Any]:
        contents = [text for text in self.texts if text is not None]
        # Lists of parts are joined only where there is more than one content: an error names the part.
        content = contents[0] if len(contents) == 1 else "".join(map(_joined, contents)) if contents else None
        if content is None and not self.calls:
            content = ""
        return {"role": "assistant", "content": content, **({"tool_calls": self.calls} if self.calls else {})}


def _messages(items: Sequence[Any], where: str) -> Iterator[Any]:
    turn = _Turn()
    for number, item in enumerate(items):
        place = f"{where}[{number}]"
        kind = item.get("type") if isinstance(item, dict) else "message"
        if kind in (None, "message") and isinstance(item, dict) and item.get("role") == "assistant":
            turn.begun = True
            turn.texts.append(item.get("content"))
            turn.calls.extend(item.get("tool_calls") or ())
        elif kind == "reasoning":
            thoughts = [f"<think>{text}</think>" for text in _reasoning(item, place)]
            turn.begun = turn.begun or bool(thoughts)
            turn.texts += thoughts
        elif kind == "function_call":
            turn.begun = True
            turn.calls.append(_call(item, place))
        else:
            if turn.begun:
                yield turn.message()
                turn = _Turn()
            yield _other(item, kind, place)
    if turn.begun:
        yield turn.message()


def _other(item: Any, kind: Any, place: str) -> Any:
    if not isinstance(item, dict):
        return item
    if kind == "function_call_output":
        output = item.get("output")
        if not isinstance(output, str | list):
            raise InvalidItem(f"{place}.output: found {repr_of(output)}; it must be text or a list of parts of text")
        return {"role": "tool", "content": output, "tool_call_id": _text(item, "call_id", place)}
    if kind in (None, "message"):
        return {key: item[key] for key in _MESSAGE_FIELDS if key in item}
    raise InvalidItem(
        f"{place}: found an item of type {kind!r}; a prompt consists of messages, function calls with their outputs, "
        "and reasoning"
    )


def _call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    function = {"name": _text(item, "name", place), "arguments": item.get("arguments")}
    return {"id": _text(item, "call_id", place), "type": "function", "function": function}


def _reasoning(item: Mapping[str, Any], place: str) -> Iterator[str]:
    parts = item.get("summary") or item.get("content") or []
    for number, part in enumerate(parts if isinstance(parts, list) else [parts]):
        if not isinstance(part, dict) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise InvalidItem(f"{place}: its part {number} is {repr_of(part)}; only text can be read")
        if part["text"]:
            yield part["text"]


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidItem(f"{place}.{name}: found {repr_of(value)}; it must be text")
    return value


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else None for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


def input_items(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Input items of a prompt."""
    items: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            items.append(_output_item(message))
            continue
        if message["content"] or not message.get("tool_calls"):
            items.append({"type": "message", "role": message["role"], "content": message["content"]})
        items.extend(map(_call_item, message.get("tool_calls") or ()))
    return items


def output_items(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Output items of a policy's turns: reasoning, messages, function calls, and the answers of tools.

    Thoughts are reasoning, also if the prompt has opened them, or they never end.
    """
    return list(_output_items(messages))


def _output_items(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            yield _output_item(message)
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
        yield from map(_call_item, calls)


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


def _call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "function_call",
        "call_id": call.get("id"),
        "name": function["name"],
        "arguments": function["arguments"],
    }


def _output_item(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": message["content"]}
