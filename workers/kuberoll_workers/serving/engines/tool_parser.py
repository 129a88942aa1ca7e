"""vLLM's parsers of tool calls, by their names, on whole responses."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Sequence
from typing import Any

from kuberoll_workers.data.thoughts import thoughts_end
from kuberoll_workers.data.tool_calls import (
    InvalidCall,
    ToolCalls,
    UnreadableCall,
    checked_call,
    limited,
    parse_tool_calls,
    unreadable,
    with_text,
)
from kuberoll_workers.data.tools import Tool
from kuberoll_workers.serving.engines.payloads import ended_calls, hidden, shown

# The parsers' own names for the text that begins a call; those built on vLLM's parser engine drop it from the content.
_BEGINNINGS = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "bot_string", "tc_start")


class UnusableParser(ValueError):
    """The named parser cannot be used; the message names the field of the manifest."""


class ToolParser:
    """One of vLLM's tool parsers."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        """
        Args:
            name: As in vLLM's `--tool-call-parser`.
            tokenizer: The model's, as transformers has it.

        Raises:
            UnusableParser: vLLM has no such parser, or it does not fit the model.
        """
        from vllm.tool_parsers import ToolParserManager

        where = "spec.generation.toolCallParser"
        names = ToolParserManager.list_registered()
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UnusableParser(f"{where}: vLLM has no tool parser {name!r}{hint or '.'} It has {', '.join(names)}")
        self._class = ToolParserManager.get_tool_parser(name)
        self._plain = name == "hermes"
        # A policy writes many calls that cannot be read, and some parsers log a traceback for each. Not by a level,
        # which vLLM resets when it configures its logging.
        for base in self._class.__mro__:
            logging.getLogger(base.__module__).addFilter(_no_traceback)
        self._tokenizer = tokenizer
        try:
            self._extract("", [])
        except NotImplementedError as error:
            raise UnusableParser(
                f"{where}: {name} does not read texts, but only works inside vLLM's own chat server: choose another"
            ) from error
        except Exception as error:
            raise UnusableParser(f"{where}: {name} does not fit this model: {error}") from error

    @property
    def demands_plain(self) -> bool:
        """True if calls that a request demands are sampled as plain JSON, and not in the form that `parse` reads."""
        return bool(self._class.supports_required_and_named)

    def parse(self, text: str, tools: Sequence[Tool], *, thoughts: int | None = None, cut: bool = False) -> ToolCalls:
        """Calls in a response.

        Args:
            text: With special tokens, but the one that ended it.
            tools: Those that the policy may call: some parsers read arguments by their schemas.
            thoughts, cut: See `parse_tool_calls`.
        """
        thoughts = thoughts_end(text, cut=cut) if thoughts is None else thoughts
        if self._plain:
            # The same form, read by position.
            return parse_tool_calls(text, thoughts=thoughts, cut=cut)
        before, text = text[:thoughts], text[thoughts:]
        masked = hidden(text)
        try:
            found, content, beginnings = self._extract(masked, tools)
            whole = self._whole(found, masked, tools) if cut else len(found)
        except Exception as error:
            # A parser may stumble over anything that a policy writes.
            return ToolCalls(invalid=[unreadable(text, f"it cannot be read: {type(error).__name__}: {error}", 0)])
        calls = ToolCalls()
        for number, call in enumerate(found):
            function = call.function
            try:
                if number >= whole:
                    raise InvalidCall("the response was cut off within it")
                made = checked_call(shown(function.name), _arguments(function.arguments))
            except InvalidCall as error:
                written = shown(f"{function.name}: {function.arguments}")
                calls.invalid.append(unreadable(written, str(error), len(calls)))
                continue
            # Random where the policy wrote none.
            calls.calls.append({**made, "id": call.id} if call.id and call.id in text else made)
        content = None if content is None else shown(content)
        if found:
            return limited(with_text(calls, before, content or ""))
        begun = any(beginning in text for beginning in beginnings)
        if begun or (content or "").strip() != text.strip():
            calls.invalid.extend(_unread(text))
        return calls

    def _whole(self, found: Sequence[Any], masked: str, tools: Sequence[Tool]) -> int:
        """Number of the calls that a response has made before it was cut off; parsers complete the last one."""
        # Nothing that follows a whole call changes it.
        same = _common(found, self._extract(f"{masked}x", tools)[0])
        ended = ended_calls(masked)
        return same if ended is None else min(same, ended)

    def _extract(self, text: str, tools: Sequence[Tool]) -> tuple[list[Any], str | None, list[str]]:
        """Calls, the text beside them, and what begins a call."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[], tools=list(tools) or None)
        parser = self._class(self._tokenizer, request.tools)
        information = parser.extract_tool_calls(text, request)
        beginnings = [getattr(parser, name, None) for name in _BEGINNINGS]
        calls = list(information.tool_calls) if information.tools_called else []
        return calls, information.content, [found for found in beginnings if isinstance(found, str) and found]


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of calls at the beginning that are the same."""
    same = (
        (a.function.name, a.function.arguments) == (b.function.name, b.function.arguments)
        for a, b in zip(one, other, strict=False)
    )
    return next((number for number, is_same in enumerate(same) if not is_same), min(len(one), len(other)))


def _arguments(text: Any) -> Any:
    """A call's arguments as a parser returned them, with the marks of tags again.

    Raises:
        InvalidCall: They are not JSON.
    """
    if not isinstance(text, str) or not text.strip():
        return text
    try:
        return shown(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InvalidCall(f"the arguments are not JSON: {error}") from error


def _no_traceback(record: logging.LogRecord) -> bool:
    return record.exc_info is None


def _unread(text: str) -> list[Any]:
    """Calls that a parser gave up on, with reasons where they are known."""
    plain = parse_tool_calls(text, thoughts=0)
    if not plain.invalid:
        return [unreadable(text, "it is not a call in the model's format", 0)]
    other = "another call of this response cannot be read, so none was made"
    return [
        call if isinstance(call, UnreadableCall) else unreadable(str(call["function"]), other, place)
        for place, call in enumerate(plain.in_order())
    ]
