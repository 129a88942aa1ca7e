"""Histograms of any number of values in bounded memory."""

from __future__ import annotations

import math
from typing import Any, TypeVar

_MOST_BINS = 512
_MOST_VALUES = 32
_MOST_BARS = 32
_MOST_BITS = 60
_FINEST = -20

_Key = TypeVar("_Key", int, float)


class Histogram:
    """Counts of values in bins whose width is a power of two, and the values themselves while they are few.

    The width doubles when there would be more than 512 bins: two bins then become one exactly, so that neither the
    order of the values nor how they were divided before a `merge` changes anything.

    Attributes:
        count: Finite values.
        nonfinite: Others, which nothing else tells of.
    """

    def __init__(self, *, finest: int = _FINEST) -> None:
        """Begin.

        Args:
            finest: The narrowest width is 2 ** finest; 0 for whole numbers.
        """
        self.count = 0
        self.nonfinite = 0
        self._whole = finest == 0
        self._power = finest
        self._bins: dict[int, int] = {}
        self._values: dict[float, int] | None = {}
        self._sum = 0.0
        self._mean = 0.0
        self._squares = 0.0
        self._low = math.inf
        self._high = -math.inf

    def add(self, value: float) -> None:
        """Count a value."""
        if not math.isfinite(value):
            self.nonfinite += 1
            return
        value += 0.0  # of -0 too
        self.count += 1
        self._sum += value
        step = value - self._mean
        self._mean += step / self.count
        self._squares += step * (value - self._mean)
        self._widen(value, value)
        place = self._place(value)
        self._bins[place] = self._bins.get(place, 0) + 1
        self._keep({value: 1})

    def merge(self, other: Histogram) -> None:
        """Count the values of another one too."""
        self.nonfinite += other.nonfinite
        if not other.count:
            return
        both = self.count + other.count
        step = other._mean - self._mean
        self._squares += other._squares + step * step * self.count * other.count / both
        self._mean += step * other.count / both
        self._sum += other._sum
        self.count = both
        self._widen(other._low, other._high)
        while self._power < other._power:
            self._double()
        for place, count in other._bins.items():
            coarse = place >> (self._power - other._power)
            self._bins[coarse] = self._bins.get(coarse, 0) + count
        self._keep(other._values)

    def _place(self, value: float) -> int:
        return math.floor(math.ldexp(value, -self._power))

    def _widen(self, low: float, high: float) -> None:
        self._low, self._high = min(self._low, low), max(self._high, high)
        while self._wide():
            self._double()

    def _wide(self) -> bool:
        # In bins much narrower than themselves, values have no place that a float could hold.
        largest = max(abs(self._low), abs(self._high))
        if math.frexp(largest)[1] - self._power > _MOST_BITS:
            return True
        return self._place(self._high) - self._place(self._low) >= _MOST_BINS

    def _double(self) -> None:
        self._power += 1
        old, self._bins = self._bins, {}
        for place, count in old.items():
            self._bins[place >> 1] = self._bins.get(place >> 1, 0) + count

    def _keep(self, values: dict[float, int] | None) -> None:
        if self._values is None:
            return
        for value, count in (values or {}).items():
            self._values[value] = self._values.get(value, 0) + count
        if values is None or len(self._values) > _MOST_VALUES:
            self._values = None

    @property
    def mean(self) -> float | None:
        return self._mean if self.count else None

    @property
    def total(self) -> float:
        return self._sum

    def quantile(self, part: float) -> float | None:
        """The value that `part` of all values are not above: exact while they are few, within a bin otherwise."""
        if not self.count:
            return None
        rank = max(1, math.ceil(part * self.count))
        if self._values is not None:
            return _at_rank(self._values, rank)
        place = _at_rank(self._bins, rank)
        width = math.ldexp(1.0, self._power)
        inside = 0.0 if self._whole and self._power == 0 else 0.5
        return min(max((place + inside) * width, self._low), self._high)

    def as_json(self) -> dict[str, Any]:
        """The numbers, and at most 32 bars `[low, high, count]`; of single values `low` and `high` are one."""
        return {
            "count": self.count,
            "nonfinite": self.nonfinite,
            "mean": _finite(self.mean),
            "std": _finite(math.sqrt(max(0.0, self._squares) / (self.count - 1))) if self.count > 1 else None,
            "min": self._low if self.count else None,
            "median": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "max": self._high if self.count else None,
            "total": _finite(self.total),
            "whole": self._whole,
            "bars": self._bars(),
        }

    def _bars(self) -> list[tuple[float, float, int]]:
        if self._values is not None:
            return [(value, value, count) for value, count in sorted(self._values.items())]
        bins, power = self._bins, self._power
        while max(bins) - min(bins) >= _MOST_BARS:
            coarse: dict[int, int] = {}
            for place, count in bins.items():
                coarse[place >> 1] = coarse.get(place >> 1, 0) + count
            bins, power = coarse, power + 1
        width = math.ldexp(1.0, power)
        return [(place * width, (place + 1) * width, count) for place, count in sorted(bins.items())]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _at_rank(counts: dict[_Key, int], rank: int) -> _Key:
    seen = 0
    for key in sorted(counts):
        seen += counts[key]
        if seen >= rank:
            return key
    raise AssertionError("a rank is never above the count")
