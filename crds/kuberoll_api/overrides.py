"""`--set path=value`: changes of a manifest from the command line."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

from kuberoll_api.documents import Document, Path, Unreadable, format_path, parse_value

_PART = re.compile(r'\.?(?:"(?P<quoted>[^"]+)"|(?P<key>[^.\[\]"=]+))|\[(?P<index>\d+)\]')


class OverrideError(ValueError):
    """An override that cannot be applied."""


def parse_override(text: str) -> tuple[Path, Any]:
    """`spec.environments[0].config.size=3` as a path and a YAML value; keys with dots go in double quotes.

    Raises:
        OverrideError: It is not of that form.
    """
    parts: list[str | int] = []
    position = 0
    while position < len(text) and text[position] != "=":
        found = _PART.match(text, position)
        if found is None:
            break
        if found["index"] is not None:
            parts.append(int(found["index"]))
        else:
            parts.append(found["quoted"] or found["key"])
        position = found.end()
    if not parts or position >= len(text) or text[position] != "=":
        raise OverrideError(f"--set {text}: write path=value, for example --set spec.rollout.maxTurns=5")
    try:
        return tuple(parts), parse_value(text[position + 1 :])
    except Unreadable as error:
        raise OverrideError(f"--set {text}: {error}") from error


def apply_overrides(document: Document, overrides: Iterable[str]) -> Document:
    """A copy of the document with the overrides in it; objects that are missing on the way are made.

    Raises:
        OverrideError: A path leads through something that is no object, or to a list item that is not there.
    """
    changed = Document(copy.deepcopy(document.value), document.lines, dict(document.overrides))
    for text in overrides:
        path, value = parse_override(text)
        changed.value = _set(changed.value, path, value, text, path)
        changed.overrides[path] = f"--set {text}"
    return changed


def _set(node: Any, path: Path, value: Any, text: str, whole: Path) -> Any:
    if not path:
        return value
    head, rest = path[0], path[1:]
    above = format_path(whole[: len(whole) - len(path)])
    if isinstance(head, int):
        if not isinstance(node, list):
            raise OverrideError(f"--set {text}: {above} is not a list")
        if head >= len(node):
            raise OverrideError(f"--set {text}: {above} has {len(node)} items; the first is [0]")
        node[head] = _set(node[head], rest, value, text, whole)
        return node
    if node is None:
        node = {}
    if not isinstance(node, dict):
        raise OverrideError(f"--set {text}: {above} is not an object, so it has no field {head}")
    node[head] = _set(node.get(head), rest, value, text, whole)
    return node
