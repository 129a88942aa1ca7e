"""Text of models and environments, made fit to be looked at."""

from __future__ import annotations

import re

_PICTURES = 0x2400
"""Unicode has a visible sign for each of the first 32 control characters, in their order from here on."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """The text with every character that moves a cursor, colours a terminal or reorders a line made a visible sign.

    New lines and tabs stay. A control character becomes its Unicode picture (`␛`), any other such one `⟨U+202E⟩`.
    """
    return _CONTROL.sub(_sign, text)


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def one_line(text: str, limit: int) -> str:
    """The beginning of a text on one line, at most `limit` characters."""
    line = " ".join(visible(text[: 4 * limit]).split())
    return line if len(line) <= limit and len(text) <= 4 * limit else line[: limit - 1] + "…"


def cut(text: str, limit: int) -> str:
    """At most `limit` characters of a text, of its beginning and its end, and a note of how many are left out."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    head = limit - tail
    return f"{text[:head]}\n[… {len(text) - limit:,} characters left out …]\n{text[len(text) - tail :]}"
