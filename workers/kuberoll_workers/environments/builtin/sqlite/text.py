"""Text of SQL: its statements, and the clauses that order and limit a query's rows. Each scan is one pass."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = re.compile(
    r"""(?P<skipped>\s++|--[^\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/|\Z))"""
    r"""|'[^']*+'?|"[^"]*+"?|`[^`]*+`?|\[[^\]]*+\]?|\w++|."""
)


def tokens(sql: str) -> Iterator[str]:
    """The tokens of a text, without white space and comments; texts and quoted names are one token each."""
    return (token[0] for token in _TOKEN.finditer(sql) if token["skipped"] is None)


def statements(sql: str) -> list[str]:
    """The statements of a text, without empty ones."""
    found: list[str] = []
    begun: list[str] = []
    for piece in _pieces(sql):
        begun.append(piece)
        text = "".join(begun)
        # A trigger has statements within.
        if sqlite3.complete_statement(text):
            found.append(text)
            begun = []
    found.append("".join(begun))
    return [text.strip() for text in found if any(token != ";" for token in tokens(text))]


def _pieces(sql: str) -> Iterator[str]:
    """The text, cut after each semicolon that is not in a text, a name or a comment."""
    start = 0
    for token in _TOKEN.finditer(sql):
        if token[0] == ";":
            yield sql[start : token.end()]
            start = token.end()
    yield sql[start:]


@dataclass(frozen=True, slots=True)
class Clauses:
    """Outermost parts of a query.

    Attributes:
        body: All before ORDER BY and LIMIT.
        order: Terms of ORDER BY; empty if there is none.
        limited: Whether there is a LIMIT.
        offset: Expression of its OFFSET; empty if there is none.
    """

    body: str
    order: str
    limited: bool
    offset: str

    def unlimited(self, tie_breakers: str) -> str:
        """The query without its LIMIT, and with further terms in its ORDER BY, if it has one."""
        return f"{self.body}\nORDER BY {self.order}\n, {tie_breakers}" if self.order else self.body


def clauses_of(query: str) -> Clauses:
    """The clauses of a query, which may end with a semicolon."""
    end, depth, before = len(query), 0, ""
    # Positions of clauses: the first character of its keyword, and the one after it.
    found: dict[str, tuple[int, int]] = {}
    order_start = 0
    for token in _TOKEN.finditer(query):
        if token["skipped"] is not None:
            continue
        word = token[0].upper()
        depth += (word == "(") - (word == ")")
        if depth == 0:
            if word == "ORDER":
                order_start = token.start()
            elif word == "BY" and before == "ORDER":
                found["order"] = (order_start, token.end())
            elif word in ("LIMIT", "OFFSET") or (word == "," and "LIMIT" in found):
                found[word] = token.span()
            elif word == ";":
                end = token.start()
        before = word
    limit = found.get("LIMIT", (end, end))
    order = found.get("order", (limit[0], limit[0]))
    offset = query[limit[1] : found[","][0]] if "," in found else query[found.get("OFFSET", (end, end))[1] : end]
    return Clauses(query[: order[0]], query[order[1] : limit[0]].strip(), "LIMIT" in found, offset.strip())
