from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.adapters.lossless import decode, encode

KEYS = st.text(max_size=4) | st.sampled_from(["$tuple", "$items", "$integer", "$float"]) | st.integers()
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS | st.tuples(st.integers(), st.booleans()), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_survive_json(value: Any) -> None:
    text = json.dumps(encode(value), allow_nan=False)
    again = decode(json.loads(text))
    assert again == value
    assert repr(again) == repr(value)  # 1 == True == 1.0, and [] is no ()


def test_numbers_that_json_readers_lose_are_texts() -> None:
    assert encode([2**64, -(2**63) - 1, float("inf"), 2**64 - 1]) == [
        {"$integer": str(2**64)},
        {"$integer": str(-(2**63) - 1)},
        {"$float": "inf"},
        2**64 - 1,
    ]


@pytest.mark.parametrize("value", [{"$integer": "x"}, {"$tuple": 3}, {"$items": [[[1], 2]]}, {"$float": "a"}])
def test_marks_without_content_are_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        decode(value)
