"""Samples of streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.analysis.report.sample import EvenSample, thinned


def constant(value: int) -> Callable[[], int]:
    return lambda: value


@given(st.integers(0, 500), st.integers(1, 40))
def test_as_many_as_there_may_be_and_evenly(count: int, most: int) -> None:
    sample = EvenSample[int](most, most_bytes=10**9, size=lambda item: 1)
    for number in range(count):
        sample.offer(constant(number))
    items = sample.items(most, 10**9)
    assert sample.offered == count
    assert len(items) == min(count, most)
    assert items == sorted(set(items))
    if count > most:
        gaps = [after - before for before, after in itertools.pairwise(items)]
        assert not gaps or max(gaps) <= 4 * count / most


@given(st.lists(st.integers(1, 100), max_size=300), st.integers(1, 2000))
def test_no_more_bytes_than_allowed(sizes: list[int], most_bytes: int) -> None:
    sample = EvenSample[int](1000, most_bytes=most_bytes, size=lambda item: item)
    for size in sizes:
        sample.offer(constant(size))
    items = sample.items(1000, most_bytes)
    assert sum(items) <= most_bytes
    if sum(sizes) <= most_bytes:
        assert items == sizes


def test_what_is_not_kept_is_not_made() -> None:
    made = []
    sample = EvenSample[int](4, most_bytes=100, size=lambda item: 1)
    for number in range(10_000):
        sample.offer(lambda number=number: made.append(number) or number)  # type: ignore[misc, func-returns-value]
    assert len(made) < 100


@given(st.lists(st.integers()), st.integers(0, 50))
def test_thinned(items: list[int], count: int) -> None:
    assert len(thinned(items, count)) == min(len(items), count)
