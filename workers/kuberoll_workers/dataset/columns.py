"""Mapping of a dataset's own fields to those that KubeRoll reads (`dataset.columns`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

_MOST_NAMED = 12


class MissingColumn(LookupError):
    """A row lacks a mapped field; the message names the field and those that the row has."""


class ColumnMap:
    """The mapping of a dataset's columns, prepared once for all of its rows.

    Attributes:
        names: Names of the row's fields, by KubeRoll's: `{"metadata.ground_truth": "answer"}`.
        metadata: Names in the metadata that a column is mapped to.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.names = dict(columns)
        self.metadata = frozenset(
            target.removeprefix("metadata.") for target in columns if target.startswith("metadata.")
        )
        self._moved = frozenset(columns.values())
        self._targets = [(target, tuple(target.split(".")), name) for target, name in columns.items()]

    def __bool__(self) -> bool:
        return bool(self.names)

    def mapped(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row with its fields under KubeRoll's names.

        A whole field is moved; a value inside a field is copied, and the field stays.

        Raises:
            MissingColumn: The row has no field of a name in `names`.
        """
        moved = self._moved
        mapped = {name: value for name, value in row.items() if name not in moved}
        for target, path, name in self._targets:
            _put(mapped, path, field_of(row, name, target))
        return mapped


def field_of(row: Mapping[str, Any], name: str, target: str) -> Any:
    """The value of a field: of the whole name if the row has that, else along its dots, where numbers are indexes.

    Args:
        target: The field that it is mapped to, for the error.

    Raises:
        MissingColumn: There is none.
    """
    if name in row:
        return row[name]
    value: Any = row
    walked: list[str] = []
    for part in name.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and _is_index(part) and -len(value) <= int(part) < len(value):
            value = value[int(part)]
        else:
            raise MissingColumn(_why(value, part, walked, name, target))
        walked.append(part)
    return value


def _is_index(part: str) -> bool:
    return part.removeprefix("-").isdecimal() and len(part) < 10


def _why(value: Any, part: str, walked: list[str], name: str, target: str) -> str:
    place = f"{'.'.join(walked)} has" if walked else "the row has"
    if isinstance(value, Mapping):
        found = f"{place} no field {part!r}; it has {_listed(value)}{_did_you_mean(part, value)}"
    elif isinstance(value, list):
        found = f"{place} {len(value)} items, and no item {part!r}"
    else:
        found = f"{place} no fields, because it is a single value"
    return f"{name}: {found}. dataset.columns maps it to {target}"


def _listed(fields: Iterable[str]) -> str:
    names = list(fields)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}" if names else "none"


def _did_you_mean(part: str, fields: Iterable[str]) -> str:
    near = difflib.get_close_matches(part, [str(name) for name in fields], n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _put(row: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set a value in nested objects, which are copied, because they are the caller's."""
    inside = row
    for name in path[:-1]:
        known = inside.get(name)
        inside[name] = dict(known) if isinstance(known, dict) else {}
        inside = inside[name]
    inside[path[-1]] = value
