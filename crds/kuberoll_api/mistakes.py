"""What is wrong with a manifest, in words for the person who wrote it."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from kuberoll_api.documents import Document, Path, format_path
from kuberoll_api.rolloutjob import RolloutJob

_MOST_SHOWN = 20
_MOST_NAMES = 16

_KINDS = {dict: "an object", list: "a list", str: "the text", bool: "the boolean", int: "the number",
          float: "the number", type(None): "nothing"}  # fmt: skip

_EXPECTED = {
    "string_type": "text (put it in quotes)",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "list_type": "a list",
}  # fmt: skip

_BOUNDS = {
    "greater_than": ("gt", "more than {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "at most {}"),
    "string_too_short": ("min_length", "at least {} characters long"),
    "string_too_long": ("max_length", "at most {} characters long"),
    "too_short": ("min_length", "at least {} items long"),
    "too_long": ("max_length", "at most {} items long"),
    "string_pattern_mismatch": ("pattern", "text of the form {}"),
    "literal_error": ("expected", "one of {}"),
}


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake.

    Attributes:
        where: `file:line`, or the command-line override that made it.
        field: Path of the field, as it is written; empty where the whole file is meant.
        message: What was found, what is allowed, how to mend it.
    """

    where: str
    field: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.field, self.message) if part)


class ManifestError(ValueError):
    """A manifest that cannot be used; its text is at most a screen."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__(mistakes)
        self.mistakes = mistakes

    def __str__(self) -> str:
        lines = [str(mistake) for mistake in self.mistakes[:_MOST_SHOWN]]
        more = len(self.mistakes) - len(lines)
        return "\n".join([*lines, *([f"and {more} more"] if more else [])])


def explain(error: ValidationError, document: Document, file: str) -> list[Mistake]:
    """A pydantic error as mistakes, in the order in which they stand in the file.

    A value that fits none of several types is one mistake.
    """
    found: dict[Path, list[dict[str, Any]]] = {}
    for item in error.errors(include_url=False):
        detail: dict[str, Any] = dict(item)
        found.setdefault(_written_path(detail, document.value), []).append(detail)
    misspelled = {
        (*path[:-1], near)
        for path, details in found.items()
        if details[0]["type"] == "extra_forbidden" and (near := _nearest(path)) is not None
    }
    mistakes = []
    for path, details in found.items():
        if path in misspelled and details[0]["type"] == "missing":
            continue
        where = document.override_of(path) or f"{file}:{document.line_of(path)}"
        message = _message(path, details, document.value)
        mistakes.append((document.line_of(path), Mistake(where, format_path(path) if path else "", message)))
    return [mistake for _, mistake in sorted(mistakes, key=lambda pair: pair[0])]


def _written_path(detail: dict[str, Any], value: Any) -> Path:
    """The error's place in the document: without the names of types that pydantic tried on the way."""
    path: list[str | int] = []
    for part in detail["loc"]:
        if _has(value, part):
            value = value[part]
        elif detail["type"] == "missing":
            path.append(part)
            break
        else:
            break
        path.append(part)
    return tuple(path)


def _has(value: Any, part: str | int) -> bool:
    if isinstance(part, int):
        return isinstance(value, list) and part < len(value)
    return isinstance(value, dict) and part in value


def _message(path: Path, details: list[dict[str, Any]], value: Any) -> str:
    kinds = {detail["type"] for detail in details}
    if "extra_forbidden" in kinds:
        return _unknown(path)
    if "missing" in kinds:
        return f"is missing{_described(path)}"
    if "value_error" in kinds:
        return "; ".join(str(detail["ctx"]["error"]) for detail in details if detail["type"] == "value_error")
    allowed = " or ".join(dict.fromkeys(_allowed(detail) for detail in details))
    return f"found {_found(_at(value, path))}; it must be {allowed}{_described(path)}"


def _allowed(detail: dict[str, Any]) -> str:
    kind = detail["type"]
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    if kind in _BOUNDS:
        key, text = _BOUNDS[kind]
        return text.format(detail["ctx"][key])
    return str(detail["msg"])


def _found(value: Any) -> str:
    kind = _KINDS.get(type(value), f"a {type(value).__name__}")
    if value is None or isinstance(value, (dict, list)):
        return kind
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{kind} {text if len(text) <= 60 else text[:57] + '...'}"


def _unknown(path: Path) -> str:
    names = _names(path[:-1])
    near = _nearest(path)
    # The commonest slip is a field at the wrong depth.
    elsewhere = [] if near else [place for place in _places(str(path[-1])) if place != path]
    text = "there is no such field"
    if near:
        text += f"; did you mean {near}?"
    elif elsewhere:
        text += f"; did you mean {format_path(elsewhere[0])}?"
    if 0 < len(names) <= _MOST_NAMES:
        text += f" Allowed: {', '.join(names)}"
    return text


def _names(path: Path) -> list[str]:
    model = _model_at(path)
    return [field.alias or name for name, field in model.model_fields.items()] if model else []


def _nearest(path: Path) -> str | None:
    """The field that was probably meant by one that does not exist."""
    return next(iter(difflib.get_close_matches(str(path[-1]), _names(path[:-1]), n=1)), None)


def _described(path: Path) -> str:
    model = _model_at(path[:-1])
    for name, field in model.model_fields.items() if model else ():
        if path and (field.alias or name) == path[-1] and field.description:
            return f". {field.description}"
    return ""


def _model_at(path: Path) -> type[BaseModel] | None:
    model: type[BaseModel] | None = RolloutJob
    for part in path:
        if isinstance(part, int):
            continue
        fields = {field.alias or name: field for name, field in model.model_fields.items()} if model else {}
        model = _model_in(fields[part].annotation) if part in fields else None
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (list, typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            if (model := _model_in(argument)) is not None:
                return model
    return None


def _places(name: str) -> Iterator[Path]:
    """Where in a RolloutJob there is a field of this name, shallowest first."""
    level: list[tuple[Path, type[BaseModel]]] = [((), RolloutJob)]
    while level:
        deeper = []
        for path, model in level:
            for attribute, field in model.model_fields.items():
                alias = field.alias or attribute
                if alias == name:
                    yield (*path, alias)
                if (inner := _model_in(field.annotation)) is not None:
                    deeper.append(((*path, alias), inner))
        level = deeper


def _at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value
