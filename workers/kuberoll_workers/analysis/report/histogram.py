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

    As many single values as that are bars of their own, whose `low` and `high` are one. Otherwise all bars are as
    wide as the smallest power of two with which they are few enough; `low` belongs to a bar and `high` does not.

    Args:
        values: Finite ones.
        whole: The values are whole numbers, which no bar divides.
    """
    values = values + 0.0  # of -0 too
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
    # In bars much narrower than themselves, values have no place that a float could hold.
    power = max(finest, math.frexp(max(abs(low), abs(high)))[1] - _MOST_BITS)
    while math.floor(math.ldexp(high, -power)) - math.floor(math.ldexp(low, -power)) >= _MOST_BARS:
        power += 1
    return power
