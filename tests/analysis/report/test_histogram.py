"""Histograms with few bars."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.analysis.report.histogram import Bar, bars

VALUES = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=200)


def of(values: list[float], *, whole: bool = False) -> list[Bar]:
    return bars(np.array(values, dtype=np.float64), whole=whole)


@given(VALUES, st.randoms())
def test_order_changes_no_bar(values: list[float], chance: object) -> None:
    shuffled = list(values)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert of(values) == of(shuffled)


@given(VALUES)
def test_bars_hold_every_value_and_are_few(values: list[float]) -> None:
    found = of(values)
    assert sum(count for _, _, count in found) == len(values)
    assert len(found) <= 32
    for low, high, count in found:
        assert count == sum(low == value if low == high else low <= value < high for value in values)


def test_few_values_stay_what_they_are() -> None:
    assert of([0.1, 0.7, 0.1, 1.0]) == [(0.1, 0.1, 2), (0.7, 0.7, 1), (1.0, 1.0, 1)]
    assert of([-0.0, 0.0]) == [(0.0, 0.0, 2)]
    assert of([]) == []


def test_values_of_every_size() -> None:
    found = of([*map(float, range(100)), 1e300, -1e300, 1e-300])
    assert sum(count for _, _, count in found) == 103
    assert all(math.isfinite(bound) for low, high, _ in found for bound in (low, high))


def test_whole_numbers_are_not_divided() -> None:
    assert {high - low for low, high, _ in of([float(number) for number in range(33)], whole=True)} == {2.0}
    assert {low % 1 for low, _, _ in of([number + number / 64 for number in range(40)], whole=True)} == {0.0}


@pytest.mark.parametrize("scale", [1.0, 1 / 7, 1e6, -1e-3])
@pytest.mark.parametrize("count", [33, 100, 1000, 5000])
def test_bars_of_many_values_are_few_and_hold_them(count: int, scale: float) -> None:
    values = [number * scale for number in range(count)]
    found = of(values)
    assert 1 < len(found) <= 32
    for low, high, held in found:
        assert low < high
        assert held == sum(low <= value < high for value in values)
    assert sum(held for _, _, held in found) == count
