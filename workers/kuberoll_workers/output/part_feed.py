"""A worker's side of the direct path: the parts that it has written last, for consumers that wait for them."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from kuberoll_workers.output.fed_parts import ANSWER_BYTES, FedPart, FedParts

WINDOW_BYTES: Final = 16 << 20
"""Bytes of recent parts that are kept."""


class Hurried(Protocol):
    """A journal whose pending records can be written before their time."""

    def hurry(self) -> None: ...


class PartFeed:
    """The last parts of a worker's journals, and the consumers that wait for the next.

    What is in it has been written: a consumer never has a record that the journal lacks. While a consumer waits, a
    prompt group that has ended is written at once.
    """

    def __init__(self, *, window_bytes: int = WINDOW_BYTES, answer_bytes: int = ANSWER_BYTES) -> None:
        """
        Args:
            window_bytes: Bytes of parts that are kept; who is further behind reads the journals.
            answer_bytes: Bytes of an answer; larger parts are not kept.
        """
        self._epoch = uuid.uuid4().hex
        self._window_bytes = window_bytes
        self._answer_bytes = answer_bytes
        self._parts: deque[FedPart] = deque()
        self._size = 0
        # Numbers of the first part that is kept, and of the one that is written next.
        self._first = self._next = 0
        self._journals: list[Hurried] = []
        self._shards: list[int] = []
        self._waiting = 0
        self._due = False
        self._ended = False
        self._changed = asyncio.Event()
        self.plan_written = asyncio.Event()
        """Set when a consumer says that it has written a plan."""

    def attach(self, journals: Iterable[Hurried], *, shards: Sequence[int]) -> None:
        """Take the journals whose parts come, and the shards among them."""
        self._journals, self._shards = list(journals), list(shards)

    def written(self, file: str, data: bytes) -> None:
        """Take a part that is in the object store now."""
        self._next += 1
        self._parts.append(FedPart(file, data))
        self._size += len(data)
        if len(data) > self._answer_bytes:
            # Worth a request of its own, to the store.
            self._forget(len(self._parts))
        while self._size > self._window_bytes:
            self._forget(1)
        self._wake()

    def due(self) -> None:
        """Note that records wait to be written for which a consumer has a use."""
        self._due = True
        if self._waiting:
            self._hurry()

    def end(self) -> None:
        """Let those go who wait: no part follows."""
        self._ended = True
        self._wake()

    async def after(self, epoch: str, place: int, seconds: float) -> FedParts:
        """The parts from a place on, or the next one.

        Args:
            epoch, place: Of the last answer; of another process, or before the kept parts: the answer has a gap.
            seconds: Time to wait for a part.
        """
        if epoch != self._epoch or not self._first <= place <= self._next:
            return self._answer(self._next, gap=True)
        if place == self._next and not self._ended:
            self._waiting += 1
            try:
                if self._due:
                    self._hurry()
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                pass
            finally:
                self._waiting -= 1
        if place < self._first:
            # A part that was too large to be kept.
            return self._answer(self._next, gap=True)
        found, size = list[FedPart](), 0
        for number in range(place - self._first, len(self._parts)):
            size += len(self._parts[number].lines)
            if found and size > self._answer_bytes:
                break
            found.append(self._parts[number])
        return self._answer(place + len(found), parts=found)

    def _answer(self, place: int, *, gap: bool = False, parts: list[FedPart] | None = None) -> FedParts:
        ended = self._ended and place == self._next
        return FedParts(
            epoch=self._epoch,
            next=place,
            gap=gap,
            shards=self._shards,
            ended=ended,
            parts=[] if parts is None else parts,
        )

    def _hurry(self) -> None:
        self._due = False
        for journal in self._journals:
            journal.hurry()

    def _forget(self, count: int) -> None:
        for _ in range(count):
            self._size -= len(self._parts.popleft().lines)
        self._first += count

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
