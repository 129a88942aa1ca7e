"""Values from elsewhere: taken over exactly, or refused with the place that is wrong in them."""

from __future__ import annotations

import math
from typing import Any

import numpy
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.plain import (
    MAX_DEPTH,
    MAX_ITEMS,
    NotPlain,
    is_finite,
    message_of,
    own_copy,
    parse,
    plain,
    printable,
    repr_of,
)
from tests.values import anything, texts


def same(value: Any, made: Any) -> bool:
    """Whether a copy says what the value said: types and all, but for tuples, arrays and subclasses."""
    if isinstance(value, numpy.ndarray | numpy.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return (
            type(made) is list
            and len(made) == len(value)
            and all(same(item, other) for item, other in zip(value, made, strict=True))
        )
    if isinstance(value, dict):
        return type(made) is dict and made.keys() == value.keys() and all(same(value[key], made[key]) for key in value)
    if isinstance(value, bool | float | int):
        return type(made) in (bool, float, int) and isinstance(value, type(made)) and value == made
    return type(made) in (str, type(None)) and bool(value == made)


@given(anything)
def test_any_value_is_copied_exactly_or_refused_with_its_place(value: Any) -> None:
    try:
        made = plain(value, "metadata")
    except NotPlain as refusal:
        words = str(refusal)
    else:
        assert same(value, made)
        assert parse(orjson.dumps(made), "metadata") == made
        return
    assert words.startswith(("metadata", "a key of metadata"))
    words.encode()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"history": [0, 0, 0, {"score": math.nan}]}, r"metadata\.history\[3\]\.score is nan"),
        ({"history": (numpy.float32(1), {"score": numpy.float64("inf")})}, r"metadata\.history\[1\]\.score is inf"),
        ({"a b": 2**64}, r"metadata\['a b'\] is an integer beyond 64 bits: store it as a text"),
        ({"n": -(2**63) - 1}, "beyond 64 bits"),
        ({"x": [{1, 2}]}, r"metadata\.x\[0\] is set \{1, 2\}, which JSON cannot represent"),
        ({"x": {1: 2}}, r"metadata\.x has the key int 1; keys must be texts"),
        ({"x": "ab\udc80"}, r"metadata\.x holds a lone surrogate, U\+DC80 at position 2"),
        ({"x": "y" * 2000}, "metadata has 2008 bytes as JSON; at most 1000 can be stored"),
    ],
)
def test_the_place_is_named(value: Any, words: str) -> None:
    with pytest.raises(NotPlain, match=words):
        plain(value, "metadata", max_bytes=1000)


def test_64_bits_are_held() -> None:
    value = {"low": -(2**63), "high": 2**64 - 1, "text": "\U0001f600"}
    assert plain(value, "metadata") == value


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_depth_is_bounded_alike_on_every_way(kind: Any) -> None:
    def nested(depth: int, value: Any) -> Any:
        for _ in range(depth):
            value = {"a": value} if kind is dict else kind([value])
        return value

    made = plain(nested(MAX_DEPTH, 1), "metadata")
    assert parse(orjson.dumps(made), "metadata") == made
    # Whatever holds it in a record is deeper by some levels, and is written and read all the same.
    assert orjson.loads(orjson.dumps({"turn": {"metadata": made}}))["turn"]["metadata"] == made
    with pytest.raises(NotPlain, match="nested more than 250 levels deep"):
        plain(nested(MAX_DEPTH + 1, 1), "metadata")
    with pytest.raises(NotPlain, match="nested more than 250 levels deep"):
        parse(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "metadata")


def test_copies_share_nothing() -> None:
    value = {"a": [1, {"b": (math.inf, "\ud800")}], "c": {1: 2**70}}
    made = own_copy(value)
    assert made == value
    made["a"][1]["b"] = None
    assert value["a"][1]["b"] == (math.inf, "\ud800")  # type: ignore[index]
    held = own_copy({"object": [lambda: 1]})
    assert held["object"][0]() == 1


@given(texts, st.integers(min_value=0, max_value=20))
def test_a_message_is_short_and_can_be_written(text: str, limit: int) -> None:
    made = printable(text, limit)
    made.encode()
    assert len(made) <= 6 * limit + 40
    if len(text) <= limit and text.isascii():
        assert made == text


def test_words_are_found_for_what_has_none() -> None:
    class Wordless(Exception):
        def __str__(self) -> str:
            raise SystemExit

        __repr__ = __str__

    assert message_of(Wordless()) == "(its message cannot be shown: __str__ raised SystemExit)"
    assert repr_of(Wordless()) == "Wordless (its representation cannot be shown)"
    assert repr_of("x" * 200) == "str '" + "x" * 76 + "..."


@given(st.one_of(st.floats(), st.integers(), st.integers(10**300, 10**320), st.booleans(), anything))
def test_a_finite_number_is_one_that_a_float_can_hold(value: Any) -> None:
    try:
        finite = isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        finite = False
    assert is_finite(value) is finite
    assert is_finite(numpy.float64("nan")) is False


def test_a_value_is_bounded_before_it_is_walked() -> None:
    """Lists that hold each other are as long as 2 ** 60 values, and take no time."""
    nested: Any = [0.5]
    for _ in range(60):
        nested = [nested, nested]
    for value in (nested, {"a": {"b": (nested,)}}, type("Own", (list,), {})([nested])):
        with pytest.raises(NotPlain, match=f"metadata.* has more than {MAX_ITEMS} values in its lists and objects"):
            plain({"state": value}, "metadata")
    assert plain([0] * 1000, "metadata") == [0] * 1000
