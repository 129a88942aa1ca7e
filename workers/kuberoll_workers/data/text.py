"""Texts of models and environments, made safe to display."""

from __future__ import annotations

import re

_PICTURES = 0x2400
"""First of Unicode's visible symbols for the 32 control characters."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """The text with visible symbols for all characters that move a cursor, color a terminal or reorder a line.

    Newlines and tabs stay. A control character becomes its Unicode symbol (`␛`), other such characters `⟨U+202E⟩`.
    """
    return _CONTROL.sub(_sign, text)


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def one_line(text: str, limit: int) -> str:
    """Beginning of a text on one line, with at most `limit` characters."""
    line = " ".join(visible(text[: 4 * limit]).split())
    return line if len(line) <= limit and len(text) <= 4 * limit else line[: limit - 1] + "…"


def cut(text: str, limit: int) -> str:
    """At most `limit` characters from the beginning and the end of a text, with a note about the number of omitted
    characters."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    head = limit - tail
    return f"{text[:head]}\n[… {len(text) - limit:,} characters left out …]\n{text[len(text) - tail :]}"


def clock(seconds: float) -> str:
    """`h:mm:ss`, or `m:ss` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """A short time: milliseconds below a second, else seconds."""
    return f"{seconds * 1000:.1f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"
