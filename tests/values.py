"""Python values of any kind, as somebody's code may hand them over."""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
from typing import Any

import numpy
from hypothesis import strategies as st


class Word(str):
    __slots__ = ()


class Count(enum.IntEnum):
    ONE = 1


class Row(dict[Any, Any]):
    pass


class Opaque:
    pass


texts = st.text(st.characters(exclude_categories=()), max_size=20)
"""Texts of all characters, lone surrogates among them."""

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**80), max_value=2**80),
    st.floats(),
    st.floats(width=32).map(numpy.float32),
    st.integers(min_value=-(2**63), max_value=2**63 - 1).map(numpy.int64),
    texts,
    texts.map(Word),
    st.binary(max_size=5),
    st.complex_numbers(),
    st.sampled_from(
        [
            Count.ONE,
            Opaque(),
            Opaque,
            print,
            ...,
            datetime.datetime(2026, 11, 22),
            uuid.UUID(int=1),
            decimal.Decimal("1.5"),
            range(3),
            numpy.arange(3),
            numpy.array([1.5, numpy.nan]),
            numpy.array([[True]]),
        ]
    ),
)

anything: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(texts, inner, max_size=3).map(Row),
        st.dictionaries(st.one_of(st.integers(), st.none(), st.booleans(), texts), inner, max_size=3),
        st.frozensets(st.integers(), max_size=3),
    ),
    max_leaves=12,
)
"""Values of any kind, nested."""
