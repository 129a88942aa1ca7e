r"""Parts of a response: what follows the thoughts, and what is in boxes, tags or fenced blocks.

Every scan is one pass, linear in the length of the response, because a policy writes it and could exploit a slow one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# Escaped braces are text; a box is a brace right after its command.
_BRACE: Final = re.compile(r"(?P<box>(?<=\\boxed) *+\{)|\\.|[{}]", re.DOTALL)
_TAG: Final = re.compile(r"(?i)<(/?)answer>")
_FENCE: Final = re.compile(r"^([ \t]{0,3})```([^\n`]*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Place of a part in a text: from `start` to `end` with its delimiters, from `inner` to `inner_end` without."""

    start: int
    end: int
    inner: int
    inner_end: int

    def of(self, text: str) -> str:
        """The part, without its delimiters."""
        return text[self.inner : self.inner_end]


@dataclass(frozen=True, slots=True)
class Fence:
    """Line that opens or closes a block of code.

    Attributes:
        start: Position of the line's first character.
        end: Position after its last character, where the line break is.
        indented: Whether spaces precede its ticks.
        info: Text after its ticks, stripped.
    """

    start: int
    end: int
    indented: bool
    info: str


def after_thoughts(text: str) -> str:
    """The text after the last `</think>`; empty if thoughts were begun and never ended."""
    _, closed, after = text.rpartition("</think>")
    if closed:
        return after
    # Thoughts that were cut off are no answer.
    return "" if "<think>" in text else text


def boxes(text: str) -> list[Span]:
    r"""All complete `\boxed{…}`, also those within others, by their starts.

    Braces within are balanced; an escaped brace (`\{`) is text.
    """
    found: list[Span] = []
    # Of each open brace: positions where its box begins and its content; None if it is no box.
    opened: list[tuple[int, int] | None] = []
    for brace in _BRACE.finditer(text):
        if brace["box"] is not None:
            opened.append((brace.start() - len("\\boxed"), brace.end()))
        elif brace[0] == "{":
            opened.append(None)
        elif brace[0] == "}" and opened and (box := opened.pop()) is not None:
            found.append(Span(box[0], brace.end(), box[1], brace.start()))
    return sorted(found)


def tags(text: str) -> Iterator[Span]:
    """All `<answer>…</answer>`, in order; of a tag that is opened twice before it is closed, the inner one."""
    opened: re.Match[str] | None = None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            opened = tag
        elif opened is not None:
            yield Span(opened.start(), tag.end(), opened.end(), tag.start())
            opened = None


def fences(text: str) -> Iterator[Fence]:
    """All lines of three ticks, at most three spaces before them and a text without ticks after them."""
    for line in _FENCE.finditer(text):
        yield Fence(line.start(), line.end(), bool(line[1]), line[2].strip())


def last_boxed(text: str) -> str | None:
    """The content of the complete `\\boxed{…}` that begins last; None if there is none."""
    found = boxes(text)
    return found[-1].of(text) if found else None


def last_tagged(text: str) -> str | None:
    """The content of the last `<answer>…</answer>`; None if there is none."""
    last = max(tags(text), default=None)
    return None if last is None else last.of(text)


def last_block(text: str) -> str | None:
    """The content of the last closed block of code whose fences are not indented; None if there is none."""
    opened: Fence | None = None
    block = None
    for fence in fences(text):
        if fence.indented:
            continue
        if opened is None:
            opened = fence
        elif not fence.info:
            block, opened = text[opened.end + 1 : fence.start], None
    return block
