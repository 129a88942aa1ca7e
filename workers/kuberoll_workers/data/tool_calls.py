"""Tool calls in the text of a response: JSON objects between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kuberoll_workers.data.plain import NotPlain, plain, printable, unicode_text
from kuberoll_workers.data.thoughts import thoughts_end
from kuberoll_workers.data.tools import MAX_NAME, ToolCall, tool_call

MAX_CALLS = 64
"""Maximum number of calls in one response; further ones are invalid."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SHOWN = 2000
# Special tokens that end a response, such as <|im_end|>.
_END_TOKENS = re.compile(r"(\s*<[^<>\s]{1,64}>)*\s*")
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_Answer = TypeVar("_Answer", bound=Mapping[str, Any])


class InvalidCall(ValueError):
    """A text is not a call of a tool."""


@dataclass(frozen=True, slots=True)
class UnreadableCall:
    """A call that cannot be read.

    Attributes:
        text: What the policy wrote, perhaps shortened.
        error: What is wrong with it.
        place: Its place among all calls of the response, from 0.
    """

    text: str
    error: str
    place: int = 0


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Calls of tools in a response.

    Attributes:
        calls: Those that can be read, in their order; `id` only where the policy wrote it.
        invalid: The others.
        text: What the response says beside its calls, with its thoughts; None: it calls nothing that can be read.
    """

    calls: list[ToolCall] = field(default_factory=list)
    invalid: list[UnreadableCall] = field(default_factory=list)
    text: str | None = None

    def __bool__(self) -> bool:
        return bool(self.calls or self.invalid)

    def __len__(self) -> int:
        return len(self.calls) + len(self.invalid)

    def in_order(self) -> list[ToolCall | UnreadableCall]:
        """All calls in the order in which the policy wrote them."""
        return _merged(self.calls, self.invalid, [call.place for call in self.invalid])


def parse_tool_calls(text: str, *, thoughts: int | None = None, cut: bool = False) -> ToolCalls:
    """Calls in a response of models that write them as Hermes and Qwen do.

    A call is `{"name": ..., "arguments": {...}}` between tags; the last one may lack its closing tag, where a stop
    string or a special token ended the response. The object ends where its JSON does, whatever its texts say.

    Args:
        thoughts: Number of characters at the beginning that are thoughts, which call nothing; None: see `thoughts_end`.
        cut: Whether the response was cut off: then a call without its closing tag is not complete.
    """
    thoughts = thoughts_end(text, cut=cut) if thoughts is None else thoughts
    found = ToolCalls()
    at = first = text.find(_OPEN, thoughts)
    while at >= 0 and len(found) <= MAX_CALLS:
        begin = at + len(_OPEN)
        value, end, error = _value(text, begin, cut=cut)
        try:
            found.calls.append(_call(value, error))
        except InvalidCall as invalid:
            body = text[begin:end].removesuffix(_CLOSE).strip()
            found.invalid.append(unreadable(body, str(invalid), len(found)))
        at = text.find(_OPEN, end)
    return limited(with_text(found, text[:thoughts], text[thoughts : max(first, thoughts)]))


def with_text(found: ToolCalls, thoughts: str, said: str) -> ToolCalls:
    """The calls with the text beside them.

    Args:
        said: What the response says beside its calls after its thoughts.
    """
    return replace(found, text=thoughts + said) if found.calls else found


def limited(found: ToolCalls) -> ToolCalls:
    """At most `MAX_CALLS` calls; if there are more, the last one is invalid and says so."""
    if len(found) <= MAX_CALLS:
        return found
    error = f"the response has more than {MAX_CALLS} calls; this one and those after it were left out"
    kept = found.in_order()[:MAX_CALLS]
    last = kept.pop()
    text = last.text if isinstance(last, UnreadableCall) else json.dumps(last, ensure_ascii=False)
    return replace(
        found,
        calls=[call for call in kept if not isinstance(call, UnreadableCall)],
        invalid=[call for call in kept if isinstance(call, UnreadableCall)] + [unreadable(text, error, len(kept))],
    )


def unreadable(text: str, error: str, place: int) -> UnreadableCall:
    """A call that cannot be read, its text of bounded length."""
    return UnreadableCall(printable(text, _SHOWN), printable(error, _SHOWN), place)


def checked_call(name: Any, arguments: Any) -> ToolCall:
    """A call of a tool, after checks of what a parser returned.

    Args:
        arguments: An object, or its JSON as text.

    Raises:
        InvalidCall: The message says what is wrong.
    """
    if not isinstance(name, str) or not name:
        raise InvalidCall("the tool's name is missing: a call is an object with name (text) and arguments (object)")
    if len(name) > MAX_NAME:
        raise InvalidCall(f"the name of the tool has {len(name)} characters; at most {MAX_NAME} are taken")
    try:
        unicode_text(name, "the name of the tool")
        if isinstance(arguments, str):
            arguments = json.loads(arguments) if arguments.strip() else {}
        arguments = plain({} if arguments is None else arguments, "the arguments")
    except NotPlain as error:
        raise InvalidCall(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise InvalidCall(f"the arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise InvalidCall("the arguments must be a JSON object")
    return tool_call(name, arguments)


def call_id(turn: int, number: int) -> str:
    """Id of a call that has none: nine letters and digits, the form that every chat template takes.

    Args:
        turn, number: Of the response and of the call in it, from 1.
    """
    return f"call{turn:03d}{number:02d}"


def message_fields(found: ToolCalls, turn: int) -> dict[str, Any]:
    """Fields of the response's chat message; empty without calls.

    A call keeps the id that the policy wrote; others get a `call_id`.

    Args:
        turn: Number of the turn, from 1.
    """
    if not found:
        return {}
    fields: dict[str, Any] = {}
    taken: set[str] = set()

    def identity(number: int, written: Any = None) -> str:
        kept = isinstance(written, str) and _ID.fullmatch(written) and written not in taken
        chosen = written if kept else call_id(turn, number + 1)
        taken.add(chosen)
        return chosen

    for place, call in enumerate(found.in_order()):
        if isinstance(call, UnreadableCall):
            wrong = {"id": identity(place), "text": call.text, "error": call.error, "place": place}
            fields.setdefault("invalid_tool_calls", []).append(wrong)
        else:
            called = {"id": identity(place, call.get("id")), "type": "function", "function": call["function"]}
            fields.setdefault("tool_calls", []).append(called)
    if found.calls and found.text is not None:
        fields["text"] = found.text
    return fields


def in_order_of_calls(response: Mapping[str, Any], answers: Sequence[_Answer]) -> list[_Answer]:
    """The answers to a response's calls in the order in which the policy wrote these.

    Templates and trainers pair answers with calls by their order. Messages that answer none of the calls keep their
    places.

    Args:
        response: The response's chat message.
        answers: The environment's messages.
    """
    calls, invalid = response.get("tool_calls") or [], response.get("invalid_tool_calls") or []
    written = _merged(calls, invalid, [call.get("place", len(calls)) for call in invalid])
    places = {call["id"]: place for place, call in enumerate(written)}
    own = [number for number, answer in enumerate(answers) if answer.get("tool_call_id") in places]
    ordered = list(answers)
    for number, answer in zip(
        own, sorted((answers[number] for number in own), key=lambda answer: places[answer["tool_call_id"]]), strict=True
    ):
        ordered[number] = answer
    return ordered


def _merged(calls: Sequence[Any], invalid: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Calls that can be read, with the others at their places."""
    merged = list(calls)
    for place, call in sorted(zip(places, invalid, strict=True), key=lambda item: item[0]):
        merged.insert(place, call)
    return merged


def _value(text: str, begin: int, *, cut: bool) -> tuple[Any, int, str | None]:
    """The JSON after an opening tag, the position after the closing tag, and why it is none."""
    try:
        value, end = _DECODER.raw_decode(text, _after(_SPACE, text, begin))
    except json.JSONDecodeError as error:
        why = f"it is not JSON: {error.msg}, at character {error.pos - begin}"
        if cut and (error.pos >= len(text) or error.msg.startswith("Unterminated")):
            return None, len(text), f"{why}: the response was cut off there"
        return None, _end_of_invalid(text, begin), why
    except (ValueError, RecursionError) as error:
        return None, _end_of_invalid(text, begin), f"it is not JSON: {error}"
    after = _after(_SPACE, text, end)
    if text.startswith(_CLOSE, after):
        return value, after + len(_CLOSE), None
    if text.startswith(_OPEN, after):
        return value, after, None
    if _after(_END_TOKENS, text, end) == len(text):
        # A stop string or the end of the turn is in place of the tag.
        return value, len(text), "the response was cut off before its closing tag" if cut else None
    until = _end_of_invalid(text, end)
    more = text[end:until].removesuffix(_CLOSE).strip()
    return value, until, f"it is not JSON: there is more text after the object: {more[:80]!r}"


def _call(value: Any, error: str | None) -> ToolCall:
    if error is not None:
        raise InvalidCall(error)
    if not isinstance(value, dict):
        raise InvalidCall("it is not a JSON object; a call is an object with name (text) and arguments (object)")
    return checked_call(value.get("name"), value.get("arguments", value.get("parameters")))


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Position after what a pattern, which may be empty, matches at another one."""
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _end_of_invalid(text: str, begin: int) -> int:
    """End of what cannot be read as a call: after its closing tag, before the next opening one, or of the text."""
    opened, closed = text.find(_OPEN, begin), text.find(_CLOSE, begin)
    if closed >= 0 and (opened < 0 or closed < opened):
        return closed + len(_CLOSE)
    return opened if opened >= 0 else len(text)
