r"""Parts of what a response says after its thoughts: what is in boxes, tags, fenced blocks, or on its last line.

Every scan is one pass, linear in the length of the response, because a policy writes it and could exploit a slow one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# Escaped braces are text; a box is a brace right after its command.
_BRACE: Final = re.compile(r"(?P<box>(?<=\\boxed) *+\{)|\\.|[{}]", re.DOTALL)
_TAG: Final = re.compile(r"(?i)<(/?)answer>")
# Variation selectors and fillers, which are no format characters.
_BLANK: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0" + "".join(map(chr, range(0xFE00, 0xFE10))))
_FENCE: Final = re.compile(r"^([ \t]{0,3})```([^\n`]*)$", re.MULTILINE)
_COURTESY: Final = re.compile(
    r"(?i)[\s*_>#-]*(?:i hope (?:this|that|it)\b|hope (?:this|that|it)\b|let me know\b|(?:please )?feel free\b"
    r"|if you (?:have|need|would|want|'d)\b|(?:is there )?anything else\b|(?:do|would) you (?:have|want|like|need)\b"
    r"|thank(?:s| you)\b|good luck\b|happy to help\b|you(?:'re| are) welcome\b|have a (?:great|nice|good)\b|cheers\b)"
    r"[^\d\\$]{0,200}"
)

HEDGES: Final = (
    r"(?:(?:clearly|obviously|definitely|certainly|surely|undoubtedly|actually|indeed|simply|just|therefore|thus|hence"
    r"|then|now|really|in fact|of course|most likely|likely|probably|instead|rather|still|also|always|given by|equal to"
    r"|going to be|as follows|again|finally)(?:\s{0,20}+,\s{0,20}+|\s{1,20}+|(?=:)))"
)
"""Pattern of one word between `the answer is` and the answer, with the space after it."""

RETRACTION: Final = (
    r"(?i:\b(?:wait|actually|hmm|oops|sorry|correction|scratch that|on reflection|on second thought|no)\b"
    r"[^.!?\n]{0,80}?\b(?:it|that|this)(?:'s|’s|\s(?:is|was|should\sbe|must\sbe|has\sto\sbe)))"
)
"""Pattern of the words by which a text takes an answer back and gives another one, up to that one."""


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


def whole_lines(text: str) -> str:
    """The text of a response that was cut off, up to its last line break: the line after it is not complete."""
    return text[: text.rfind("\n") + 1]


def legible(text: str) -> str:
    """The text without characters that cannot be seen, and with full-width letters and decimal digits as ASCII.

    What looks the same to a reader is the same answer: `１２` is 12, and so is a 12 with a zero-width space in it.
    """
    if text.isascii():
        return text
    return "".join(map(_legible, text))


def _legible(letter: str) -> str:
    if letter.isascii():
        return letter
    if unicodedata.category(letter) == "Cf" or letter in _BLANK:
        return ""
    if "\uff01" <= letter <= "\uff5e":
        return chr(ord(letter) - 0xFEE0)
    if letter == "\u3000":
        return " "
    return str(unicodedata.decimal(letter)) if letter.isdecimal() else letter


def last_line(text: str) -> str:
    """The last line that says something, without the courtesies (`I hope this helps!`) that may follow it."""
    lines = [line for line in text.splitlines() if line.strip("*_ \t")]
    while len(lines) > 1 and _COURTESY.fullmatch(lines[-1]):
        lines.pop()
    return lines[-1] if lines else ""


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
