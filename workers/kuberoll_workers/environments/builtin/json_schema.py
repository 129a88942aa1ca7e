"""JSON that a policy wrote, compared with a schema: in a time that the policy cannot stretch.

jsonschema compares the items of an array in pairs, and its regular expressions cannot be interrupted.
"""

from __future__ import annotations

import contextvars
import functools
import time
from collections.abc import Iterator
from typing import Any

import orjson

_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("deadline")


def is_json_of(schema: str, text: str, *, seconds: float) -> bool:
    """True if a text is JSON of a schema.

    Args:
        schema: The schema's text.
        seconds: Time for the schema's regular expressions; JSON that needs more is not of the schema.

    Raises:
        ValueError: The schema is none; the message says why.
    """
    validator = _validator(schema)
    token = _deadline.set(time.monotonic() + seconds)
    try:
        return bool(validator.is_valid(orjson.loads(text)))
    except (orjson.JSONDecodeError, RecursionError, TimeoutError):
        return False
    finally:
        _deadline.reset(token)


@functools.lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    import jsonschema
    from jsonschema.validators import extend, validator_for

    schema = orjson.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("it must be an object")
    made = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        made.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(error.message) from error
    return extend(made, {"uniqueItems": _unique_items, "pattern": _pattern})(schema)


def _unique_items(validator: Any, wanted: bool, instance: Any, _: Any) -> Iterator[Any]:
    import jsonschema

    if wanted and validator.is_type(instance, "array") and len({_key(item) for item in instance}) < len(instance):
        yield jsonschema.ValidationError("items are not unique")


def _pattern(validator: Any, pattern: str, instance: Any, _: Any) -> Iterator[Any]:
    import jsonschema

    if validator.is_type(instance, "string"):
        left = _deadline.get() - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if not _compiled(pattern).search(instance, timeout=left):
            yield jsonschema.ValidationError("does not match the pattern")


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    # The standard library's `re` cannot be interrupted.
    import regex

    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"pattern {pattern[:80]!r}: {error}") from error


def _key(value: Any) -> Any:
    """A key that is equal for equal JSON values: 1 equals 1.0, and not true."""
    if isinstance(value, dict):
        return "object", frozenset((name, _key(item)) for name, item in value.items())
    if isinstance(value, list):
        return "array", tuple(_key(item) for item in value)
    return type(value) is bool, value
