"""What is wrong with tasks: file, line and field of each mistake, and how to mend it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Key = str | int
"""A step into a TOML document: the name of a field, or the index in a list, from 0."""

_MOST_LINES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One mistake of a task.

    Attributes:
        line: Line of the file, from 1; None: the whole file is meant, or one that is missing.
        field: Path of the field, `steps[1].agent.timeout_sec`; None: no field is meant.
    """

    file: Path
    line: int | None = None
    field: str | None = None
    message: str

    def __str__(self) -> str:
        """`tasks/a/task.toml:7: environment.cpus: found "two"; …`."""
        place = f"{self.file}" if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.message}" if self.field is None else f"{place}: {self.field}: {self.message}"


class TaskError(ValueError):
    """Tasks that cannot be read, or not be served; the message has a line for each mistake."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__("\n".join(map(str, mistakes)))
        self.mistakes = tuple(mistakes)


def field_name(path: Sequence[Key]) -> str | None:
    """A path as text, `steps[1].name`; None for the whole document."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".") or None


def line_of(text: str, path: Sequence[Key]) -> int | None:
    """The line on which a field of a TOML document begins, or the nearest table around it that is there.

    A document's beginnings are parsed until one has the field: the parser itself says where a statement ends, so texts
    of several lines, dotted keys and tables in lists need no rules of our own.

    Args:
        text: A document that the parser accepts.

    Returns:
        The number of the line, from 1; None if no part of the path is there, or the document is very long.
    """
    lines = text.split("\n")
    if len(lines) > _MOST_LINES:
        return None
    found = deepest(tomllib.loads(text), path)
    begin = 0
    for end in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("\n".join(lines[:end]))
        except ValueError:
            continue
        if found and len(deepest(document, found)) == len(found):
            return begin + 1
        begin = end
    return None


def deepest(document: Any, path: Sequence[Key]) -> Sequence[Key]:
    """The part of a path that a document has."""
    for depth, key in enumerate(path):
        try:
            document = document[key]
        except (LookupError, TypeError):
            return path[:depth]
    return path
