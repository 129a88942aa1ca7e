"""YAML files as documents: plain values with their line numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from kuberoll_api.manifest.yaml_values import Lines, YamlProblem, plain
from kuberoll_api.paths import Path

_EXCERPT = 120

# Parts of the parser's messages, and hints for the author of the file.
_HINTS = {
    "found character '\\t'": "indent with spaces, not with tabs",
    "mapping values are not allowed here": "put text that has a colon in quotes, or fix the indentation",
    "expected <block end>": "line this up with the lines above it",
    "that cannot start any token": "put text that begins with this character in quotes",
}


class DocumentError(Exception):
    """A text or file that cannot be read as YAML.

    Attributes:
        line: Line number from 1; None for the whole file.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML document.

    Attributes:
        value: Dicts, lists, strings, finite numbers, booleans, None.
        lines: Line numbers of the value and its parts.
        problems: Parts of the document that JSON cannot express, and that are missing in the value.
        overrides: Paths that the command line set or created, with the option's text; later ones take precedence.
    """

    value: Any
    lines: Lines
    problems: tuple[YamlProblem, ...] = ()
    overrides: tuple[tuple[Path, str], ...] = ()

    def line_of(self, path: Path) -> int:
        """Line number from 1 of a value, or of its nearest written parent."""
        place = self.lines
        for part in path:
            if part not in place.parts:
                break
            place = place.parts[part]
        return place.line

    def override_of(self, path: Path) -> str | None:
        """Text of the command-line option that set this value or one of its parents; None if there is none."""
        for place, words in reversed(self.overrides):
            if path[: len(place)] == place:
                return words
        return None


def read_documents(path: FilePath) -> list[Document]:
    """All documents of a file; empty ones are left out.

    Raises:
        DocumentError: The file cannot be read or is not YAML.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise DocumentError("the file does not exist") from error
    except IsADirectoryError as error:
        raise DocumentError("this is a directory; name the manifest inside it") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DocumentError("not UTF-8 text; save the file as UTF-8", line) from error
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror or error}") from error
    return parse_documents(text)


def parse_documents(text: str) -> list[Document]:
    """All documents of a text; empty ones are left out.

    Raises:
        DocumentError: Not YAML.
    """
    try:
        return [document for document in _compose(text) if document.value is not None or document.problems]
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise DocumentError(f"the character {error.character:#x} is not allowed in YAML; remove it", line) from error
    except MarkedYAMLError as error:
        raise _syntax_error(error, text) from error
    except YAMLError as error:
        raise DocumentError(f"not YAML: {error}") from error
    except RecursionError as error:
        raise DocumentError("nested too deeply") from error
    except Exception as error:
        # The parser fails with arbitrary exceptions at directives, versions and tags that it has not checked.
        hint = "; remove the lines that begin with %" if re.search("^%", text, re.MULTILINE) else ""
        raise DocumentError(f"not YAML: the parser failed with {type(error).__name__}{hint}") from error


def _compose(text: str) -> Iterator[Document]:
    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False
    for node in yaml.compose_all(io.StringIO(text)):
        value, place, problems = plain(node, yaml.constructor)
        yield Document(value, place, tuple(problems))


def _syntax_error(error: MarkedYAMLError, text: str) -> DocumentError:
    """Error with the parser's message, a hint, and the line with a caret below the position."""
    problem, lines = str(error.problem or error.context), text.splitlines()
    hint = next((f"; {hint}" for sign, hint in _HINTS.items() if sign in problem), "")
    message = f"YAML syntax: {problem}{hint}"
    mark, begun = error.problem_mark or error.context_mark, error.context_mark
    if mark is not None and begun is not None and mark.line >= len(lines):
        # A missing end is noticed at the end of the file; its beginning is more helpful.
        mark, message = begun, f"{message} ({error.context})"
    elif begun is not None:
        message = f"{message} ({error.context}, begun in line {begun.line + 1})"
    if mark is None or mark.line >= len(lines):
        return DocumentError(message, mark.line + 1 if mark else None)
    # Only a window of the line: some files are one long line of JSON.
    start = max(0, mark.column - _EXCERPT // 2)
    excerpt = lines[mark.line][start : start + _EXCERPT].replace("\t", " ")
    return DocumentError(f"{message}\n    {excerpt}\n    {' ' * (mark.column - start)}^", mark.line + 1)
