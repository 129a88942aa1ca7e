"""Uniform sample of a stream of unknown length, limited in items and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class EvenSample(Generic[Item]):
    """Keeps every k-th item; k doubles when it holds twice as much as the limit.

    Attributes:
        offered: Number of items so far.
    """

    def __init__(self, most: int, *, most_bytes: int, size: Callable[[Item], int]) -> None:
        """Start an empty sample.

        Args:
            most: Maximum number of items, positive.
            most_bytes: Maximum size in bytes.
            size: Returns the size of an item in bytes.
        """
        self.offered = 0
        self._most = most
        self._most_bytes = most_bytes
        self._size = size
        self._every = 1
        self._kept: list[Item] = []
        self._bytes = 0

    def offer(self, make: Callable[[], Item]) -> None:
        """Offer an item, which is only created if it is kept."""
        place, self.offered = self.offered, self.offered + 1
        if place % self._every:
            return
        item = make()
        self._kept.append(item)
        self._bytes += self._size(item)
        while len(self._kept) > 2 * self._most or (self._bytes > 2 * self._most_bytes and len(self._kept) > 1):
            self._every *= 2
            self._kept = self._kept[::2]
            self._bytes = sum(map(self._size, self._kept))

    def items(self, most: int, most_bytes: int) -> list[Item]:
        """The sample, thinned to these limits, in the order of the stream."""
        count = min(most, self._most, len(self._kept))
        while True:
            chosen = thinned(self._kept, count)
            size = sum(map(self._size, chosen))
            if size <= most_bytes or not count:
                return chosen
            count = min(count - 1, int(count * most_bytes / size))


def thinned(items: Sequence[Item], count: int) -> list[Item]:
    """`count` of the items at even distances; all items if there are no more."""
    if count >= len(items):
        return list(items)
    return [items[number * len(items) // count] for number in range(count)]
