"""Python values as JSON that keeps tuples, large integers and keys that are not texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_TUPLE, _ITEMS, _INTEGER, _FLOAT = "$tuple", "$items", "$integer", "$float"
_MARKS = (_TUPLE, _ITEMS, _INTEGER, _FLOAT)
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


def encode(value: Any) -> Any:
    """A JSON value from which `decode` makes the same Python value.

    Texts, booleans, null, usual numbers, lists, and mappings with texts as keys stay as they are. Values of other
    types, such as arrays, are left to whoever stores the result.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in _MARKS for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {_ITEMS: [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        return {_INTEGER: str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    return value


def decode(value: Any) -> Any:
    """The Python value that `encode` was given.

    Raises:
        ValueError: A mark has no valid content.
        TypeError: A key of a mapping is no possible key.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        (mark, content) = next(iter(value.items()))
        if mark == _TUPLE:
            return tuple(decode(item) for item in content)
        if mark == _ITEMS:
            return {decode(key): decode(item) for key, item in content}
        if mark == _INTEGER:
            return int(content)
        if mark == _FLOAT:
            return float(content)
    return {key: decode(item) for key, item in value.items()}
