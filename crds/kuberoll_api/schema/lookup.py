"""Lookup of the model's constraints by path, and their description in words.

Everything comes from the model's JSON schema, which the CRD uses, too: messages always match the checks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.model.types import (
    DNS_LABEL_PATTERN,
    DNS_NAME_PATTERN,
    ENTRYPOINT_PATTERN,
    JOB_NAME_PATTERN,
    LABEL_KEY_PATTERN,
    LABEL_VALUE_PATTERN,
    NAME_PATTERN,
    QUANTITY_PATTERN,
    URL_PATTERN,
    VARIABLE_PATTERN,
    VERSION_PATTERN,
)
from kuberoll_api.paths import Path

Schema = dict[str, Any]

# Patterns that are missing here are shown as regular expressions.
_FORMS = {
    DNS_LABEL_PATTERN: "only lowercase letters, digits and dashes, beginning and ending with a letter or digit",
    DNS_NAME_PATTERN: "only lowercase letters, digits, dots and dashes, beginning and ending with a letter or digit",
    JOB_NAME_PATTERN: "only lowercase letters, digits and dashes, beginning with a letter, ending with a letter "
    "or digit",
    LABEL_KEY_PATTERN: "the key of a label, as in Kubernetes (app, example.org/team)",
    LABEL_VALUE_PATTERN: "the value of a label, as in Kubernetes: only letters, digits and ._-",
    NAME_PATTERN: "only letters, digits and ._-, beginning and ending with a letter or digit",
    ENTRYPOINT_PATTERN: "of the form package.module:Class",
    QUANTITY_PATTERN: "a quantity as Kubernetes writes it (500m, 2.5, 16Gi)",
    URL_PATTERN: "beginning with http:// or https://",
    VARIABLE_PATTERN: "only letters, digits and _, not beginning with a digit",
    VERSION_PATTERN: "only letters, digits and ._+-, beginning and ending with a letter or digit",
}


def alternatives(path: Path) -> list[Schema]:
    """Schemas of which a value at this path must match one; empty if the path does not exist."""
    schemas = _choices(_root())
    for part in path:
        schemas = [choice for schema in schemas for inner in _step(schema, part) for choice in _choices(inner)]
    return schemas


def fields(path: Path) -> dict[str, Schema]:
    """Fields of the object at this path; empty if it is not an object, or has free-form keys."""
    return {name: field for schema in alternatives(path) for name, field in schema.get("properties", {}).items()}


def description(path: Path) -> str:
    """Description of the field at this path; empty if it has none."""
    if not path or isinstance(path[-1], int):
        return ""
    field = fields(path[:-1]).get(path[-1], {})
    # A field without a description has that of its model.
    words = [schema.get("description", "") for schema in (field, *_choices(field))]
    return next(filter(None, words), "")


def field_paths(name: str) -> Iterator[str]:
    """Paths of all fields with this name, the shallowest first: `spec.environments[].isolation`."""
    level = [("", _root())]
    while level:
        deeper = []
        for path, outer in level:
            for schema in _choices(outer):
                if "items" in schema:
                    deeper.append((f"{path}[]", schema["items"]))
                for field, inner in schema.get("properties", {}).items():
                    place = f"{path}.{field}".removeprefix(".")
                    if field == name:
                        yield place
                    deeper.append((place, inner))
        level = deeper


def in_words(schemas: list[Schema]) -> str:
    """Description of the allowed values: `a whole number from 1 to 1024`. Optionality is not mentioned."""
    words = [_in_words(schema) for schema in schemas if schema.get("type") != "null"]
    return " or ".join(dict.fromkeys(words))


@functools.cache
def _root() -> Schema:
    return RolloutJob.model_json_schema(by_alias=True)


def _choices(schema: Schema) -> list[Schema]:
    if "$ref" in schema:
        return _choices(_root()["$defs"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return [choice for inner in schema["anyOf"] for choice in _choices(inner)]
    return [schema]


def _step(schema: Schema, part: str | int) -> list[Schema]:
    if isinstance(part, int):
        return [schema["items"]] if "items" in schema else []
    if part in schema.get("properties", {}):
        return [schema["properties"][part]]
    free = schema.get("additionalProperties")
    return [free] if isinstance(free, dict) else []


def _in_words(schema: Schema) -> str:
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return " or ".join(filter(None, (", ".join(schema["enum"][:-1]), schema["enum"][-1])))
    match schema.get("type"):
        case "integer":
            return f"a whole number{_range(schema)}"
        case "number":
            return f"a number{_range(schema)}"
        case "boolean":
            return "true or false"
        case "string":
            return ", ".join(filter(None, (f"text{_size(schema, 'Length', 'character')}", _form(schema))))
        case "array":
            return f"a list{_size(schema, 'Items', 'item')}"
        case "object":
            return f"a mapping{_size(schema, 'Properties', 'field')}"
    return "any value"


def _range(schema: Schema) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    bounds = (("of at least", low), ("above", above), ("of at most", high), ("below", below))
    words = [f"{word} {bound}" for word, bound in bounds if bound is not None]
    return f" {' and '.join(words)}" if words else ""


def _size(schema: Schema, noun: str, unit: str) -> str:
    low, high = schema.get(f"min{noun}", 0), schema.get(f"max{noun}")
    if high is None:
        return f" of at least {low} {unit}{_s(low)}" if low else ""
    if low == high:
        return f" of {low} {unit}{_s(low)}"
    return f" of {low} to {high} {unit}s" if low else f" of at most {high} {unit}{_s(high)}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _form(schema: Schema) -> str:
    pattern = schema.get("pattern")
    return "" if pattern is None else _FORMS.get(pattern, f"of the form {pattern}")
