"""Histograms with few bars."""

from __future__ import annotations

import math

import numpy as np

from kuberoll_workers.analysis.statistics import Floats

_MOST_BARS = 32
_MOST_BITS = 60
_FINEST = -20

Bar = tuple[float, float, int]


def bars(values: Floats, *, whole: bool = False) -> list[Bar]:
    """At most 32 bars `(low, high, count)`, in order.

    Up to 32 distinct values are single bars with equal `low` and `high`. Otherwise the width of all bars is the
    smallest power of two that gives at most 32 bars; `low` is inclusive, `high` exclusive.

    Args:
        values: Finite values.
        whole: True if the values are whole numbers, so that no bar is narrower than 1.
    """
    values = values + 0.0  # turns -0 into 0
    single, counts = np.unique(values, return_counts=True)
    if len(single) <= _MOST_BARS:
        return [(value, value, count) for value, count in zip(single.tolist(), counts.tolist(), strict=True)]
    power = _power(float(single[0]), float(single[-1]), 0 if whole else _FINEST)
    places, counts = np.unique(np.floor(np.ldexp(values, -power)).astype(np.int64), return_counts=True)
    width = math.ldexp(1.0, power)
    return [
        (place * width, (place + 1) * width, count)
        for place, count in zip(places.tolist(), counts.tolist(), strict=True)
    ]


def _power(low: float, high: float, finest: int) -> int:
    # Bars much narrower than the values' magnitude exceed the precision of a float.
    power = max(finest, math.frexp(max(abs(low), abs(high)))[1] - _MOST_BITS)
    while math.floor(math.ldexp(high, -power)) - math.floor(math.ldexp(low, -power)) >= _MOST_BARS:
        power += 1
    return power
