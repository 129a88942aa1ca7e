"""Overrides of a manifest's fields from the command line: `--set path=value`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kuberoll_api.manifest.documents import Document, DocumentError, parse_documents
from kuberoll_api.paths import Path, format_path, parse_path, shown


class OverrideError(ValueError):
    """An override that cannot be applied.

    Attributes:
        override: Text of the option, including `--set`, as far as it is shown.
    """

    def __init__(self, override: str, message: str) -> None:
        super().__init__(f"{override}: {message}")
        self.override = override
        self.message = message


def parse_override(text: str) -> tuple[Path, Any]:
    """Parse `spec.environments[0].config.size=3` into a path and a YAML value; keys with dots need double quotes.

    An empty value is null, as in YAML.

    Raises:
        OverrideError: The text has another form.
    """
    path, rest = parse_path(text)
    if not path or not rest.startswith("="):
        raise OverrideError(f"--set {shown(text)}", "write path=value, for example --set spec.rollout.maxTurns=5")
    try:
        documents = parse_documents(rest[1:])
    except DocumentError as error:
        raise OverrideError(f"--set {shown(text)}", f"the value is not YAML: {error}") from error
    if len(documents) > 1:
        raise OverrideError(f"--set {shown(text)}", "there are several YAML documents; write one value")
    for document in documents:
        for problem in document.problems:
            raise OverrideError(
                f"--set {shown(text)}", ": ".join(filter(None, (shown(format_path(problem.path)), problem.message)))
            )
        return path, document.value
    return path, None


def apply_overrides(document: Document, overrides: Iterable[str]) -> Document:
    """The document with the overrides applied in order; missing mappings on the path are created.

    Raises:
        OverrideError: An override is malformed, or its path leads through a value that is not a mapping or to a missing
            list item.
    """
    for text in overrides:
        path, value = parse_override(text)
        document = replace(
            document,
            value=_set(document.value, path, value, 0, f"--set {shown(text)}"),
            problems=tuple(problem for problem in document.problems if problem.path[: len(path)] != path),
            overrides=(*document.overrides, (_made(document.value, path), f"--set {shown(text)}")),
        )
    return document


def _made(node: Any, path: Path) -> Path:
    """The outermost path that setting this path creates: everything below comes from the command line."""
    for depth, part in enumerate(path):
        inside = part in node if isinstance(node, dict) else isinstance(node, list) and isinstance(part, int)
        if not inside:
            return path[: depth + 1]
        node = node[part]
    return path


def _set(node: Any, path: Path, value: Any, depth: int, override: str) -> Any:
    """A copy of the node with the value at path[depth:]; only the nodes on the path are copied.

    YAML aliases share their value, so a change in place would show elsewhere, too.
    """
    if depth == len(path):
        return value
    part, above = path[depth], shown(format_path(path[:depth])) or "the manifest"
    if isinstance(part, int):
        if not isinstance(node, list):
            raise OverrideError(override, f"{above} is not a list")
        if part >= len(node):
            raise OverrideError(override, f"{above} has {_items(len(node))}; the first is [0]")
        return [*node[:part], _set(node[part], path, value, depth + 1, override), *node[part + 1 :]]
    if node is not None and not isinstance(node, dict):
        hint = "; choose an item, the first is [0]" if isinstance(node, list) else ""
        raise OverrideError(override, f"{above} is not a mapping, so it has no field {shown(str(part))}{hint}")
    fields = node or {}
    return {**fields, part: _set(fields.get(part), path, value, depth + 1, override)}


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count} items"
