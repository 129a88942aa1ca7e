"""Comparison of the results of queries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = tuple[Any, ...]
"""Values of a row: None, int, float, str or bytes."""

TOLERANCE = 1e-9
"""Relative difference of two floating-point numbers that count as equal: sums depend on the order of their terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Result of a reference query, and what else it may be where the query leaves that open.

    Attributes:
        rows: The result.
        ordered: Whether the query orders its rows.
        orders: Rows of the query without its LIMIT, twice: rows that tie in the query's order are in the one order and
            in the opposite one. None if that is unknown, or if the query has neither ORDER BY nor LIMIT.
        offset: Number of those rows that the query skips.
    """

    rows: Sequence[Row]
    ordered: bool = False
    orders: tuple[Sequence[Row], Sequence[Row]] | None = None
    offset: int = 0

    def allows(self, rows: Sequence[Row]) -> bool:
        """True if the rows are a right result: rows that tie may be in any order, and a LIMIT may take any of them."""
        if self.orders is None:
            return same_sequence(rows, self.rows) if self.ordered else same_rows(rows, self.rows)
        if len(rows) != len(self.rows):
            return False
        for start, end, tied in self._ties(*self.orders):
            first, last = max(start - self.offset, 0), min(end - self.offset, len(rows))
            if first < last and not _within(rows[first:last], tied):
                return False
        return True

    def _ties(self, one: Sequence[Row], other: Sequence[Row]) -> Iterator[tuple[int, int, Sequence[Row]]]:
        """Ranges of places, each with the rows that may be there: the smallest ranges with the same rows in both."""
        start = 0
        missing: Counter[Any] = Counter()
        for place, pair in enumerate(zip(one, other, strict=True) if self.ordered else (), start=1):
            for row, change in zip(pair, (1, -1), strict=True):
                key = _key(row)
                missing[key] += change
                if missing[key] == 0:
                    del missing[key]
            if not missing:
                yield start, place, one[start:place]
                start = place
        # Rows that were not read may tie with the last ones.
        yield start, len(one), [*one[start:], *(other[start:] if self.ordered else ())]


def same_rows(rows: Sequence[Row], others: Sequence[Row]) -> bool:
    """True if two results have the same rows, equally often, in any order."""
    return len(rows) == len(others) and same_sequence(sorted(rows, key=_key), sorted(others, key=_key))


def same_sequence(rows: Sequence[Row], others: Sequence[Row]) -> bool:
    """True if two results have the same rows in the same order."""
    return len(rows) == len(others) and all(
        len(row) == len(other) and all(map(same_value, row, other)) for row, other in zip(rows, others, strict=True)
    )


def same_value(one: Any, other: Any) -> bool:
    """True if two values are equal: numbers by their value, whatever their type; a text is never a number."""
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        return numbers and (one == other or math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12))
    return type(one) is type(other) and one == other


def _within(rows: Sequence[Row], others: Sequence[Row]) -> bool:
    """True if each of the rows is among the others, at least as often."""
    left = iter(sorted(others, key=_key))
    return all(any(same_sequence([row], [other]) for other in left) for row in sorted(rows, key=_key))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(_order(value) for value in row)


def _order(value: Any) -> tuple[int, Any]:
    if value is None:
        return 0, 0
    if isinstance(value, int | float):
        # Numbers that count as equal are next to each other, but for rare ones at the edge of a rounding.
        return 1, float(f"{value:.8e}") if isinstance(value, float) else value
    return (2, value) if isinstance(value, str) else (3, value)
