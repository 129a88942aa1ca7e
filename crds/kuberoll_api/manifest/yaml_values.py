"""YAML nodes as plain values with line numbers, and the parts of them that JSON cannot express.

Kubernetes stores JSON. YAML can express more (dates, tags, keys that are not text, infinity), but parsers disagree
about it. Each such value is reported as a problem with its line, and reading continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from kuberoll_api.paths import Path, quoted

MAX_VALUES = 1_000_000
"""Maximum number of values of a document with all aliases expanded; a few lines of aliases could make billions."""

_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Lines:
    """Line number of a value, and of its parts.

    Attributes:
        line: Line number from 1; that of the key, for a value in a mapping.
        parts:Places of the items of a mapping or list.
    """

    line: int
    parts: Mapping[str | int, Lines]


@dataclass(frozen=True, slots=True)
class YamlProblem:
    """A value that YAML allows and a manifest does not.

    Attributes:
        line: Line number from 1.
        message: What was found, and the remedy.
    """

    path: Path
    line: int
    message: str


def plain(root: Node, constructor: SafeConstructor) -> tuple[Any, Lines, list[YamlProblem]]:
    """The value of a node, as dicts, lists, strings, finite numbers, booleans and None.

    A value with a problem is replaced by its text or by None.

    Args:
        constructor: Constructor for numbers and booleans in the document's version of YAML.
    """
    reader = _Reader(constructor)
    read = reader.read(root, ())
    place = Lines(_line(root), read.parts)
    if read.size > MAX_VALUES:
        return None, place, [YamlProblem((), place.line, f"more than {MAX_VALUES} values with all aliases expanded")]
    return read.value, place, reader.problems


@dataclass(frozen=True, slots=True)
class _Read:
    value: Any
    parts: Mapping[str | int, Lines]
    size: int


class _Reader:
    """Reads each node once, however many aliases refer to it."""

    def __init__(self, constructor: SafeConstructor) -> None:
        self.problems: list[YamlProblem] = []
        self._done: dict[int, _Read] = {}
        self._above: set[int] = set()
        self._scalars: dict[str, tuple[str, Callable[[ScalarNode], Any]]] = {
            "bool": ("true or false", constructor.construct_yaml_bool),
            "int": ("a whole number", constructor.construct_yaml_int),
            "float": ("a number", constructor.construct_yaml_float),
        }

    def read(self, node: Node, path: Path) -> _Read:
        if id(node) in self._above:
            self._problem(path, node, "the alias refers to itself; write the value instead")
            return _Read(None, {}, 1)
        if id(node) not in self._done:
            self._above.add(id(node))
            self._done[id(node)] = self._read(node, path)
            self._above.remove(id(node))
        return self._done[id(node)]

    def _read(self, node: Node, path: Path) -> _Read:
        if isinstance(node, MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and node.tag == f"{_TAG}seq":
            return self._sequence(node, path)
        if isinstance(node, ScalarNode):
            return _Read(self._scalar(node, path), {}, 1)
        self._tagged(node, path)
        return _Read(None, {}, 1)

    def _mapping(self, node: MappingNode, path: Path) -> _Read:
        value: dict[str, Any] = {}
        inside: dict[str | int, Lines] = {}
        size = 1
        merged: list[_Read] = []
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                merged += self._merged(value_node, path)
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in value:
                message = f"occurs twice (first in line {inside[key].line}); keep one of them"
                self._problem((*path, key), key_node, message)
                continue
            read = self.read(value_node, (*path, key))
            value[key] = read.value
            inside[key] = Lines(_line(key_node), read.parts)
            size += read.size
        # A mapping's own keys win over merged ones, and earlier merges over later ones.
        for read in merged:
            value = {**read.value, **value}
            inside = {**read.parts, **inside}
            size += read.size
        return _Read(value, inside, size)

    def _merged(self, node: Node, path: Path) -> Iterator[_Read]:
        for source in node.value if isinstance(node, SequenceNode) else [node]:
            if isinstance(source, MappingNode):
                read = self.read(source, path)
                if isinstance(read.value, dict):
                    yield read
            else:
                self._problem(path, source, "<< merges mappings only")

    def _key(self, node: Node, path: Path) -> str | None:
        if isinstance(node, ScalarNode) and node.tag == f"{_TAG}str":
            return self._text(node, path)
        shown = f"the key {node.value}" if isinstance(node, ScalarNode) else "a key of several values"
        self._problem(path, node, f"found {shown}; a key must be text: put it in quotes")
        return None

    def _sequence(self, node: SequenceNode, path: Path) -> _Read:
        items = [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        inside: dict[str | int, Lines] = {
            index: Lines(_line(item), items[index].parts) for index, item in enumerate(node.value)
        }
        return _Read([item.value for item in items], inside, 1 + sum(item.size for item in items))

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        kind = str(node.tag).removeprefix(_TAG)
        if kind == "null":
            return None
        # YAML 1.1 gives a lone = or << a special tag; authors always mean the text.
        if kind in ("str", "value", "merge"):
            return self._text(node, path)
        if kind in self._scalars:
            words, construct = self._scalars[kind]
            try:
                value = construct(node)
            except (ValueError, LookupError):
                self._problem(path, node, f"found {_short(node)}, which cannot be read as {words}")
                return None
            if isinstance(value, float) and not math.isfinite(value):
                self._problem(path, node, f"found {_short(node)}; it must be a finite number")
                return None
            return value
        if kind == "timestamp":
            self._problem(path, node, f"found the date {_short(node)}; it must be text: put it in quotes")
        else:
            self._tagged(node, path)
        return None

    def _text(self, node: ScalarNode, path: Path) -> str | None:
        try:
            # JSON escapes characters beyond 16 bits as surrogate pairs ("\ud83d\ude00"), which YAML does not join.
            text: str = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._problem(path, node, 'found half a character ("\\ud800" to "\\udfff" without its other half)')
            return None
        return text

    def _tagged(self, node: Node, path: Path) -> None:
        tag = str(node.tag).replace(_TAG, "!!")
        allowed = "mappings, lists, text, numbers, true, false and null"
        self._problem(path, node, f"found a value of type {tag}; a manifest has only {allowed}")

    def _problem(self, path: Path, node: Node, message: str) -> None:
        self.problems.append(YamlProblem(path, _line(node), message))


def _line(node: Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def _short(node: ScalarNode) -> str:
    text: str = node.value
    return quoted(text if len(text) <= 60 else f"{text[:57]}...")
