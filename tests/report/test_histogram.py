"""Histograms in bounded memory."""

from __future__ import annotations

import json
import math
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.collection.report.histogram import Histogram

VALUES = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=200)


def of(values: list[float], *, finest: int = -20) -> Histogram:
    histogram = Histogram(finest=finest)
    for value in values:
        histogram.add(value)
    return histogram


@given(VALUES, st.randoms())
def test_order_changes_no_bar(values: list[float], chance: object) -> None:
    shuffled = list(values)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    one, two = of(values).as_json(), of(shuffled).as_json()
    for name in ("count", "bars", "min", "median", "p90", "max"):
        assert one[name] == two[name]


@given(VALUES, VALUES)
def test_merged_is_as_if_never_divided(left: list[float], right: list[float]) -> None:
    merged = of(left)
    merged.merge(of(right))
    one, two = merged.as_json(), of([*left, *right]).as_json()
    for name in ("count", "bars", "min", "median", "p90", "max"):
        assert one[name] == two[name]


@given(st.lists(st.floats(-1e6, 1e6), max_size=50), st.lists(st.floats(-1e6, 1e6), max_size=50))
def test_merged_has_the_moments_of_all_values(left: list[float], right: list[float]) -> None:
    merged = of(left)
    merged.merge(of(right))
    one, two = merged.as_json(), of([*left, *right]).as_json()
    for name in ("mean", "std", "total"):
        assert one[name] == (None if two[name] is None else pytest.approx(two[name], rel=1e-6, abs=1e-6))


@given(VALUES)
def test_bars_hold_every_value_and_are_few(values: list[float]) -> None:
    told = of(values).as_json()
    assert sum(count for _, _, count in told["bars"]) == len(values)
    assert len(told["bars"]) <= 33
    for low, high, count in told["bars"]:
        assert count == sum(low == value if low == high else low <= value < high for value in values)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=100))
def test_moments(values: list[float]) -> None:
    told = of(values).as_json()
    assert told["mean"] == pytest.approx(mean(values), rel=1e-9, abs=1e-6)
    assert told["std"] == pytest.approx(stdev(values), rel=1e-6, abs=1e-6)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=300), st.floats(0, 1))
def test_quantiles_are_within_a_bin(values: list[int], part: float) -> None:
    exact = sorted(values)[max(1, math.ceil(part * len(values))) - 1]
    found = of([float(value) for value in values], finest=0).quantile(part)
    assert found is not None
    assert abs(found - exact) <= max(1, (max(values) - min(values)) / 128)


def test_few_values_stay_what_they_are() -> None:
    told = of([0.1, 0.7, 0.1, 1.0]).as_json()
    assert told["bars"] == [(0.1, 0.1, 2), (0.7, 0.7, 1), (1.0, 1.0, 1)]
    assert (told["median"], told["p90"]) == (0.1, 1.0)


def test_what_is_no_number_is_told() -> None:
    told = of([math.nan, math.inf, 2.0]).as_json()
    assert (told["count"], told["nonfinite"], told["mean"], told["std"]) == (1, 2, 2.0, None)
    assert of([]).as_json()["bars"] == []


def test_values_of_every_size() -> None:
    told = of([*map(float, range(100)), 1e300, -1e300, 1e-300]).as_json()
    assert sum(count for _, _, count in told["bars"]) == 103
    json.dumps(told, allow_nan=False)


@given(st.integers(33, 511), st.integers(-1000, 1000))
def test_whole_numbers_that_have_a_bin_each_keep_exact_quantiles(count: int, first: int) -> None:
    values = [float(first + number) for number in range(count)]
    histogram = of(values, finest=0)
    for part in (0.0, 0.25, 0.5, 0.9, 1.0):
        assert histogram.quantile(part) == values[max(1, math.ceil(part * count)) - 1]


@pytest.mark.parametrize("scale", [1.0, 1 / 7, 1e6, -1e-3])
@pytest.mark.parametrize("count", [33, 100, 1000, 5000])
def test_bars_of_many_values_are_few_and_hold_them(count: int, scale: float) -> None:
    values = [number * scale for number in range(count)]
    histogram = of(values)
    assert len(histogram._bins) <= 512
    bars = histogram.as_json()["bars"]
    assert 1 < len(bars) <= 32
    for low, high, held in bars:
        assert low < high
        assert held == sum(low <= value < high for value in values)
    assert sum(held for _, _, held in bars) == count
