"""YAML files as plain values that know where they were written."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

Path = tuple[str | int, ...]
"""Where a value is inside a document: keys and list indexes from the top."""


class Unreadable(Exception):
    """A file that cannot be read as YAML.

    Attributes:
        line: Counted from 1; None where the whole file is meant.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(slots=True)
class Document:
    """One YAML document.

    Attributes:
        value: Dicts, lists, texts, numbers, booleans, None.
        lines: The line, counted from 1, of every key and list item.
        overrides: The command-line texts that set a value, by path.
    """

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    overrides: dict[Path, str] = field(default_factory=dict)

    def line_of(self, path: Path) -> int:
        """The line of a value; of the nearest parent that was written, where it was not."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def override_of(self, path: Path) -> str | None:
        """The command-line text that set this value, or brought it about on the way to another."""
        for set_path, text in self.overrides.items():
            inside = path[: len(set_path)] == set_path
            made_on_the_way = set_path[: len(path)] == path and path not in self.lines
            if inside or made_on_the_way:
                return text
        return None


def read_documents(path: FilePath) -> list[Document]:
    """All documents of a file.

    Raises:
        Unreadable: Says why, with the line where there is one.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise Unreadable("there is no such file") from error
    except IsADirectoryError as error:
        raise Unreadable("this is a directory; name the manifest inside it") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise Unreadable("not UTF-8 text", line) from error
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
    return parse_documents(text)


def parse_documents(text: str) -> list[Document]:
    """All documents of a text.

    Raises:
        Unreadable: Not YAML, or something that YAML can say and JSON cannot.
    """
    try:
        nodes = list(_yaml().compose_all(io.StringIO(text)))
        values = list(_yaml().load_all(io.StringIO(text)))
    except DuplicateKeyError as error:
        # Its message quotes both values; the key and its place are what helps.
        line = error.problem_mark.line + 1 if error.problem_mark else None
        problem = str(error.problem or error).partition(" with value")[0]
        raise Unreadable(f"{problem}: keep one of them", line) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise Unreadable(_syntax(error, text), mark.line + 1 if mark else None) from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise Unreadable(f"not valid YAML: {error}") from error
    documents = []
    for node, value in zip(nodes, values, strict=True):
        if value is None:
            continue
        lines = dict(_lines(node, (), ()))
        document = Document(value, lines)
        _refuse_non_json(document)
        documents.append(document)
    return documents


def parse_value(text: str) -> Any:
    """One YAML value, as written on a command line.

    Raises:
        Unreadable: Not YAML.
    """
    try:
        return _yaml().load(text)
    except (YAMLError, ValueError) as error:
        raise Unreadable(f"not a YAML value: {error}") from error


def _yaml() -> YAML:
    return YAML(typ="safe", pure=True)


def _syntax(error: MarkedYAMLError, text: str) -> str:
    problem = error.problem or error.context or "cannot be understood"
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"YAML syntax: {problem}"
    lines = text.splitlines()
    excerpt = lines[mark.line] if mark.line < len(lines) else ""
    return f"YAML syntax: {problem}\n    {excerpt[:120]}\n    {' ' * min(mark.column, 120)}^"


def _lines(node: Node | None, path: Path, above: tuple[int, ...]) -> Iterator[tuple[Path, int]]:
    # An alias may lead back to a node above itself; such a document has no finite value.
    if node is None or id(node) in above:
        return
    above = (*above, id(node))
    if not path:
        yield path, node.start_mark.line + 1
    if isinstance(node, MappingNode):
        for key, value in node.value:
            yield (*path, str(key.value)), key.start_mark.line + 1
            yield from _lines(value, (*path, str(key.value)), above)
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item.start_mark.line + 1
            yield from _lines(item, (*path, index), above)


def _refuse_non_json(document: Document) -> None:
    for path, value in _walk(document.value, (), ()):
        if isinstance(value, float) and not math.isfinite(value):
            raise Unreadable(f"{format_path(path)}: found {value}; write a finite number", document.line_of(path))
        if not isinstance(value, (dict, list, str, int, float, bool, type(None))):
            raise Unreadable(
                f"{format_path(path)}: found a {type(value).__name__} ({value}); put it in quotes to make it text",
                document.line_of(path),
            )
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise Unreadable(
                        f"{format_path(path)}: the key {key!r} is not text; put it in quotes", document.line_of(path)
                    )


def _walk(value: Any, path: Path, above: tuple[int, ...]) -> Iterator[tuple[Path, Any]]:
    if id(value) in above:
        raise Unreadable(f"{format_path(path)}: an alias leads back to itself")
    yield path, value
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _walk(item, (*path, key), (*above, id(value)))


def format_path(path: Path) -> str:
    """`spec.environments[0].name`; keys with dots are quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = f'"{part}"' if "." in part or "[" in part else part
            text += f".{name}" if text else name
    return text or "the document"
