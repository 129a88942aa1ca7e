"""Input items of the Responses API as chat messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kuberoll_workers.data.plain import repr_of

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
