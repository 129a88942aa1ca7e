"""What calls of tools say, hidden from parsers that search a response for tags.

Most of vLLM's parsers take the first closing tag for the end of a call, wherever it stands. Here the end of a value is
found by position: that of a JSON text where its JSON ends, that of a value between tags where a closing tag is followed
by what may follow a value. Characters of which tags are made are replaced within values before a parser reads them, and
put back into what it returns.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

_DECODER: Final = json.JSONDecoder()
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OPENING: Final = re.compile(r"[\[{]")
# Of private use; a response that has one of them is left as it is.
_STAND_INS: Final = {"<": "\ue0f0", ">": "\ue0f1", "[": "\ue0f2", "]": "\ue0f3"}
_HIDE: Final = str.maketrans(_STAND_INS)
# A value may be a list, whose brackets the parser reads.
_HIDE_TAGS: Final = str.maketrans({mark: _STAND_INS[mark] for mark in "<>"})
_SHOW: Final = str.maketrans({hidden: mark for mark, hidden in _STAND_INS.items()})
_MOST_TRIES: Final = 10_000


class Value(NamedTuple):
    """How a family writes a value: between an opening and a closing tag, after which only some texts come."""

    opening: re.Pattern[str]
    closing: str
    following: re.Pattern[str]


_VALUES: Final = (
    # Qwen3-Coder, Seed-OSS, Nemotron 3, Step 3.5, MiMo.
    Value(re.compile(r"<parameter=[^<>]*>"), "</parameter>", re.compile(r"\s*(?:<parameter=|</function>)")),
    # MiniMax.
    Value(re.compile(r"<parameter name=[^<>]*>"), "</parameter>", re.compile(r"\s*(?:<parameter |</invoke>)")),
    # DeepSeek V3.2 and later.
    Value(
        re.compile(r"<｜DSML｜parameter [^<>]*>"),
        "</｜DSML｜parameter>",
        re.compile(r"\s*(?:<｜DSML｜parameter |</｜DSML｜invoke>)"),
    ),
    # GLM.
    Value(re.compile(r"<arg_value>"), "</arg_value>", re.compile(r"\s*(?:<arg_key>|</tool_call>)")),
    # Gemma 4.
    Value(re.compile(re.escape('<|"|>')), '<|"|>', re.compile(r"\s*[,}\]]")),
)


# What begins a call, and what ends one.
_CALLS: Final = (
    ("<function=", "</function>"),
    ("<invoke name=", "</invoke>"),
    ("<｜DSML｜invoke", "</｜DSML｜invoke>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    ("<|tool_call>", "<tool_call|>"),
    ("<|action_start|>", "<|action_end|>"),
    ("<longcat_tool_call>", "</longcat_tool_call>"),
    ("<tool_call>", "</tool_call>"),
)


def ended_calls(masked: str) -> int | None:
    """Number of calls in a response that have their end; None if its family is not known to mark that.

    Args:
        masked: The text, as `hidden` returns it.
    """
    return next((masked.count(end) for begin, end in _CALLS if begin in masked), None)


def hidden(text: str) -> str:
    """The text of a response with stand-ins for the marks of tags within values; of the same length.

    A value that never ends is all of the rest.
    """
    if any(stand_in in text for stand_in in _STAND_INS.values()):
        return text
    # JSON first: its texts may have the tags of another family.
    text = _in_json(text)
    begun = [(opening.start(), value) for value in _VALUES if (opening := value.opening.search(text)) is not None]
    return _between_tags(text, min(begun, key=lambda item: item[0])[1]) if begun else text


def shown(value: Any) -> Any:
    """What a parser returned, with the marks of tags again."""
    if isinstance(value, str):
        return value.translate(_SHOW)
    if isinstance(value, list):
        return [shown(item) for item in value]
    if isinstance(value, dict):
        return {shown(key): shown(item) for key, item in value.items()}
    return value


def _between_tags(text: str, value: Value) -> str:
    parts: list[str] = []
    at = 0
    while (opening := value.opening.search(text, at)) is not None:
        end = text.find(value.closing, opening.end())
        while end >= 0 and value.following.match(text, end + len(value.closing)) is None:
            end = text.find(value.closing, end + len(value.closing))
        if end < 0:
            return "".join((*parts, text[at : opening.end()], text[opening.end() :].translate(_HIDE_TAGS)))
        parts += [text[at : opening.end()], text[opening.end() : end].translate(_HIDE_TAGS), value.closing]
        at = end + len(value.closing)
    return "".join((*parts, text[at:]))


def _in_json(text: str) -> str:
    parts: list[str] = []
    at = search = tries = 0
    while tries < _MOST_TRIES and (opening := _OPENING.search(text, search)) is not None:
        tries += 1
        begin = opening.start()
        try:
            _, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            search = begin + 1
            continue
        parts += [text[at:begin], _STRING.sub(lambda string: string[0].translate(_HIDE), text[begin:end])]
        at = search = end
    return "".join((*parts, text[at:]))
