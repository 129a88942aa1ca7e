"""Sets of numbers that are mostly dense, in memory and JSON proportional to their gaps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise


class IntervalSet:
    """A set of whole numbers from 0, as the intervals that they form."""

    __slots__ = ("_count", "_ends", "_starts")

    def __init__(self) -> None:
        # Sorted and disjoint, and no two of them touch; ends are exclusive.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._count = 0

    @classmethod
    def of(cls, bounds: Iterable[int]) -> IntervalSet:
        """The set of `bounds()`.

        Raises:
            ValueError: They are not ascending pairs.
        """
        found = cls()
        numbers = list(bounds)
        if len(numbers) % 2 or any(a >= b for a, b in pairwise(numbers)) or min(numbers, default=0) < 0:
            raise ValueError("intervals must be ascending numbers from 0, a first and an end for each")
        found._starts, found._ends = numbers[::2], numbers[1::2]
        found._count = sum(found._ends) - sum(found._starts)
        return found

    def bounds(self) -> list[int]:
        """First and exclusive end of each interval, one after the other."""
        return [bound for pair in zip(self._starts, self._ends, strict=True) for bound in pair]

    def add(self, number: int) -> None:
        """Add a number; does nothing if it is in the set."""
        if number in self:
            return
        place = bisect_right(self._starts, number)
        after_last = place > 0 and self._ends[place - 1] == number
        before_next = place < len(self._starts) and self._starts[place] == number + 1
        if after_last and before_next:
            self._ends[place - 1] = self._ends.pop(place)
            self._starts.pop(place)
        elif after_last:
            self._ends[place - 1] = number + 1
        elif before_next:
            self._starts[place] = number
        else:
            self._starts.insert(place, number)
            self._ends.insert(place, number + 1)
        self._count += 1

    def count_below(self, number: int) -> int:
        """Number of members below a number."""
        place = bisect_right(self._starts, number - 1)
        whole = sum(self._ends[:place]) - sum(self._starts[:place])
        return whole - max(0, self._ends[place - 1] - number) if place else 0

    def first_absent(self, start: int = 0) -> int:
        """The lowest number from `start` that is not in the set."""
        place = bisect_right(self._starts, start)
        return max(start, self._ends[place - 1]) if place else start

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._starts, number)
        return place > 0 and number < self._ends[place - 1]

    def __len__(self) -> int:
        return self._count
