"""Plain data: values that JSON can represent and every reader restores exactly.

Values from foreign code are checked once, when they enter; after that no further checks are needed.
"""

from __future__ import annotations

import copy
import marshal
import math
import sys
from typing import Any, TypeGuard

import orjson

MAX_DEPTH = 250
"""Maximum nesting of objects and lists: orjson writes 254 levels, and the record adds some."""

MAX_BYTES = 16 << 20
"""Maximum size of a value, in bytes of its JSON text."""

MAX_ITEMS = 1 << 20
"""Maximum number of members and elements of a value, in all of its objects and lists. One that occurs in several places
counts in each: a few lists that hold each other may be a text of any length."""

MIN_INTEGER, MAX_INTEGER = -(1 << 63), (1 << 64) - 1
"""Range of integers that JSON readers keep exact: signed and unsigned 64-bit. Beyond it many read a float."""

MAX_MESSAGE = 4000
"""Maximum length of an error's text, in characters."""

# Values of other types must not be converted silently: they would be read back as something else.
_STRICT = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


_CONTAINERS = frozenset({dict, list, tuple})


class NotPlain(ValueError):
    """A value is not plain data; the message begins with its path."""


def plain(value: Any, where: str, *, max_bytes: int = MAX_BYTES) -> Any:
    """A copy of a value that consists only of JSON's types.

    Tuples become lists; arrays, tensors and numbers of other libraries become Python's own; nothing is rounded.

    Args:
        where: Name of the value for errors.

    Raises:
        NotPlain: The message names the path and the problem: a type that JSON cannot represent, a key that is not a
            string, a non-finite number, an integer beyond 64 bits, a lone surrogate, nesting deeper than `MAX_DEPTH`,
            more than `MAX_ITEMS`, or more than `max_bytes`.
    """
    _check_items(value, where)
    copied, made = _copied(value, max_bytes)
    if copied:
        return made
    made = _walk(value, where, 0, [MAX_ITEMS])
    size = len(orjson.dumps(made))
    if size > max_bytes:
        raise NotPlain(f"{where} has {size} bytes as JSON; at most {max_bytes} can be stored")
    return made


def already_plain(value: Any, where: str) -> Any:
    """The value itself if it consists only of JSON's types, else a copy that does.

    Raises:
        NotPlain: See `plain`.
    """
    _check_items(value, where)
    return value if _copied(value, MAX_BYTES)[0] else plain(value, where)


def bare(value: Any) -> Any:
    """What a JSON value means in every file format: without null fields, and with 1 for 1.0.

    A table has nulls for missing fields, and floats for integers in a column with a float. An item of a list may be
    null.

    Raises:
        TypeError: A number is not finite.
    """
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [bare(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"found {value}, which JSON does not have; use null instead")
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value


def is_finite(value: object) -> TypeGuard[float]:
    """True for a number that a 64-bit float can hold: not NaN, not infinite, no integer beyond its range."""
    if type(value) is float:
        return math.isfinite(value)
    # The comparison of an integer with a float is exact and never overflows.
    return isinstance(value, int | float) and bool(-sys.float_info.max <= value <= sys.float_info.max)


def parse(text: bytes, where: str) -> Any:
    """Plain data from a foreign JSON text.

    Raises:
        NotPlain: It is not JSON, or too large or too deep.
    """
    if len(text) > MAX_BYTES:
        raise NotPlain(f"{where} has {len(text)} bytes as JSON; at most {MAX_BYTES} can be stored")
    try:
        made = orjson.loads(text)
    except ValueError as error:
        raise NotPlain(f"{where} is not JSON: {error}") from error
    # The number of brackets bounds the depth.
    return made if text.count(b"[") + text.count(b"{") <= MAX_DEPTH else plain(made, where)


def own_copy(value: Any) -> Any:
    """A copy that shares nothing with the value. Objects other than plain data are copied with `copy`."""
    try:
        # Exact, NaN and tuples included, and ten times as fast as copying object by object.
        return marshal.loads(marshal.dumps(value))
    except ValueError:
        return copy.deepcopy(value)


def unicode_text(value: str, where: str) -> str:
    """A text as an exact `str`.

    Raises:
        NotPlain: It has half of a surrogate pair, which no file or protocol can represent.
    """
    text = value if type(value) is str else str.__str__(value)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise NotPlain(
                f"{where} holds a lone surrogate, U+{ord(text[error.start]):04X} at position {error.start}: it is not "
                "valid Unicode"
            ) from None
    return text


def printable(text: str, limit: int = MAX_MESSAGE) -> str:
    """A text for a message: limited in length, without characters that cannot be written."""
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text) - limit} more characters)"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def message_of(error: BaseException) -> str:
    """An exception's message, even if its class misbehaves."""
    try:
        return printable(str(error))
    except BaseException as raised:
        return f"(its message cannot be shown: __str__ raised {printable(type(raised).__name__)})"


def repr_of(value: Any, limit: int = 80) -> str:
    """Type and shortened representation of a value for a message, even if its class misbehaves."""
    name = printable(type(value).__name__, limit)
    try:
        text = repr(value)
        return f"{name} {printable(text if len(text) <= limit else text[: limit - 3] + '...')}"
    except BaseException:
        return f"{name} (its representation cannot be shown)"


def _copied(value: Any, max_bytes: int) -> tuple[bool, Any]:
    """True and a copy if a value consists only of JSON's types; at the speed of orjson."""
    try:
        # In four lists, so that a value deeper than MAX_DEPTH exceeds orjson's limit.
        text = orjson.dumps([[[[value]]]], option=_STRICT)
        made = orjson.loads(text)[0][0][0][0]
        # Equal if nothing was converted, e.g. NaN to null, or an enum to its value.
        return len(text) <= max_bytes and bool(made == value), made
    except Exception:
        return False, None


def _check_items(value: Any, where: str) -> None:
    """Bound a value before anything that takes time for all of it; containers of other classes are left to `_walk`."""
    if type(value) not in _CONTAINERS:
        return
    left, found = MAX_ITEMS, [value]
    for item in found:
        children = item.values() if type(item) is dict else item
        left -= len(children)
        if left < 0:
            raise _too_many(where)
        found.extend(child for child in children if type(child) in _CONTAINERS)


def _too_many(where: str) -> NotPlain:
    return NotPlain(
        f"{_shortened(where)} has more than {MAX_ITEMS} values in its lists and objects; store it as a text"
    )


def _walk(value: Any, where: str, depth: int, left: list[int]) -> Any:
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return unicode_text(value, where)
    if isinstance(value, int):
        number = int.__add__(value, 0)
        if not MIN_INTEGER <= number <= MAX_INTEGER:
            raise NotPlain(f"{where} is an integer beyond 64 bits: store it as a text")
        return number
    if isinstance(value, float):
        if not math.isfinite(real := float.__float__(value)):
            raise NotPlain(f"{where} is {real}, which JSON cannot represent: store None instead")
        return real
    if depth >= MAX_DEPTH:
        raise NotPlain(f"{_shortened(where)} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict | list | tuple):
        # Not by a method that a subclass may have replaced.
        if isinstance(value, dict):
            left[0] -= dict.__len__(value)
        else:
            left[0] -= list.__len__(value) if isinstance(value, list) else tuple.__len__(value)
        if left[0] < 0:
            raise _too_many(where)
    if isinstance(value, dict):
        return {_key(key, where): _walk(item, _member(where, key), depth + 1, left) for key, item in dict.items(value)}
    if isinstance(value, list | tuple):
        iterator = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
        return [_walk(item, f"{where}[{index}]", depth + 1, left) for index, item in enumerate(iterator)]
    if callable(to_list := getattr(value, "tolist", None)):
        return _walk(to_list(), where, depth + 1, left)
    raise NotPlain(f"{where} is {repr_of(value)}, which JSON cannot represent")


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise NotPlain(f"{where} has the key {repr_of(key)}; keys must be texts")
    return unicode_text(key, f"a key of {where}")


def _member(where: str, key: Any) -> str:
    if not isinstance(key, str):
        return where
    name = str.__str__(key)
    return f"{where}.{name}" if name.isidentifier() and len(name) <= 80 else f"{where}[{printable(repr(name), 80)}]"


def _shortened(where: str) -> str:
    return where if len(where) <= 120 else f"{where[:57]}...{where[-57:]}"
