"""Explanation of the model's validation errors: what was found, what is allowed, and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kuberoll_api.paths import Path, quoted
from kuberoll_api.removed import replacement
from kuberoll_api.schema.lookup import Schema, alternatives, description, field_paths, fields, in_words

_MOST_NAMES = 16
_MOST_TEXT = 60
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")


def explain(error: ValidationError, value: Any) -> list[tuple[Path, str]]:
    """Paths, in the spelling of the manifest, and messages of a validation error.

    Args:
        value: The value that was validated.
    """
    found: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_path(detail, value), []).append(detail)
    # A value that fits none of several types has several details, but is one mistake.
    return [(path, _message(path, details, value)) for path, details in found.items()]


def _path(detail: ErrorDetails, value: Any) -> Path:
    """Path of the value: pydantic's, without the names of the types that it tried."""
    path: list[str | int] = []
    for part in detail["loc"]:
        inside = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if inside:
            value = value[part]
        elif detail["type"] != "missing":
            break
        path.append(part)
    if detail["type"] == "contradiction":
        path += detail["ctx"]["path"]
    return tuple(path)


def _message(path: Path, details: list[ErrorDetails], value: Any) -> str:
    for detail in details:
        match detail["type"]:
            case "contradiction":
                return detail["msg"]
            case "extra_forbidden":
                return _unknown(path)
            case "missing":
                return _sentence(f"is missing; it must be {in_words(alternatives(path))}", description(path))
    allowed = alternatives(path)
    bad = _at(value, path)
    hint = _hint(bad, allowed)
    return f"found {_found(bad)}; it must be {in_words(allowed)}{f'; {hint}' if hint else ''}"


def _sentence(message: str, more: str) -> str:
    return f"{message}. {more}" if more else message


def _unknown(path: Path) -> str:
    if (instead := replacement(path)) is not None:
        return f"was removed: {instead}"
    name, names = str(path[-1]), list(fields(path[:-1]))
    lower = {known.lower(): known for known in names}
    # Finds maxTurns for maxturn and for max_turns.
    near = _close(name.lower().replace("_", ""), lower, cutoff=0.7)
    text = "this field does not exist"
    if near:
        text += f"; did you mean {lower[near[0]]}?"
    elif (place := next(field_paths(name), None)) is not None:
        text += f"; did you mean {place}?"
    else:
        text += "; remove it."
    return f"{text} Allowed: {', '.join(names)}" if len(names) <= _MOST_NAMES else text


def _close(text: str, names: Iterable[str], *, cutoff: float) -> list[str]:
    # A text much longer than every name is no misspelling, and would take long to compare.
    return difflib.get_close_matches(text, names, n=1, cutoff=cutoff) if len(text) <= 2 * _MOST_TEXT else []


def _found(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return f"the text {quoted(value if len(value) <= _MOST_TEXT else value[: _MOST_TEXT - 3] + '...')}"
        case int() | float():
            # Python refuses to print whole numbers of thousands of digits.
            return f"the number {value}" if abs(value) < 10**_MOST_TEXT else "a number of more than 60 digits"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
    return "a mapping" if value else "an empty mapping"


def _hint(value: Any, allowed: list[Schema]) -> str:
    types = {schema.get("type") for schema in allowed}
    if isinstance(value, str):
        names = {str(name).lower(): str(name) for schema in allowed for name in schema.get("enum", ())}
        near = _close(value.lower(), names, cutoff=0.6)
        if near:
            return f"did you mean {names[near[0]]}?"
        if types & {"integer", "number"} and _NUMBER.fullmatch(value):
            return "remove the quotes"
        if "array" in types and len(value) <= _MOST_TEXT:
            return f"for a list of one, write [{quoted(value)}]"
        return ""
    if isinstance(value, float) and "integer" in types and "number" not in types and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, (bool, int, float)) and "string" in types:
        return "put it in quotes"
    return ""


def _at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value
