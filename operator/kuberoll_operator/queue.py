"""Work queue of jobs to reconcile: at most one reconcile per key at a time, none lost."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_BACKOFF = 0.5
LONGEST_BACKOFF = 60.0


class WorkQueue(Generic[K]):
    """A queue of keys, with the semantics of client-go's.

    A key that is added while it waits is not queued twice; one that is added while it is processed is processed again
    afterwards. Of several timers of a key the earliest counts. Every `get` needs a `done`; all other methods may be
    called at any time from the loop's thread.

    Args:
        clock: Time in seconds; must be the running loop's if `get` is used. None: the running loop's.
        jitter: Returns a random number in [0, 1).
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] | None = None,
        jitter: Callable[[], float] = random.random,
        first: float = FIRST_BACKOFF,
        longest: float = LONGEST_BACKOFF,
    ) -> None:
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._jitter = jitter
        self._first, self._longest = first, longest
        self._ready: deque[K] = deque()
        self._dirty: dict[K, float] = {}
        self._active: dict[K, float] = {}
        self._timers: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0
        self._failures: dict[K, int] = {}
        self._wake = asyncio.Event()

    def add(self, key: K) -> None:
        """Queue a key now."""
        self._add(key, self._clock())

    def add_after(self, key: K, seconds: float) -> None:
        """Queue a key after a number of seconds, or earlier if an earlier timer of it exists."""
        if seconds <= 0:
            return self.add(key)
        due = self._clock() + seconds
        if self._timers.get(key, due + 1) <= due:
            return None
        self._timers[key] = due
        self._serial += 1
        heapq.heappush(self._heap, (due, self._serial, key))
        self._wake.set()
        return None

    def failed(self, key: K, at_least: float = 0.0) -> float:
        """Queue a key again after a backoff that doubles with every failure in a row.

        Returns:
            Seconds until then.
        """
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        longest = min(self._longest, self._first * 2.0 ** min(failures - 1, 60))
        pause = max(at_least, longest * (0.5 + 0.5 * self._jitter()))
        self.add_after(key, pause)
        return pause

    def forget(self, key: K) -> None:
        """Reset the backoff of a key that succeeded."""
        self._failures.pop(key, None)

    def take(self) -> K | None:
        """The next key to process; None if there is none now."""
        self._expire()
        if not self._ready:
            return None
        key = self._ready.popleft()
        self._active[key] = self._dirty.pop(key)
        return key

    async def get(self) -> K:
        """Wait for the next key to process."""
        while (key := self.take()) is None:
            self._wake.clear()
            try:
                async with asyncio.timeout_at(self.next_due()):
                    await self._wake.wait()
            except TimeoutError:
                continue
        return key

    def done(self, key: K) -> None:
        """Mark the processing of a key as ended, whatever its result.

        Raises:
            KeyError: The key was not being processed.
        """
        del self._active[key]
        if key in self._dirty:
            self._ready.append(key)
            self._wake.set()

    def age(self, key: K) -> float:
        """Seconds since a key that is being processed was added, or its timer ended.

        Raises:
            KeyError: The key is not being processed.
        """
        return max(0.0, self._clock() - self._active[key])

    def next_due(self) -> float | None:
        """Clock time at which the earliest timer ends; None if there is none."""
        while self._heap and self._timers.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def depth(self) -> int:
        """Number of waiting keys, without timers."""
        return len(self._dirty)

    def oldest_age(self) -> float:
        """Seconds since the oldest key that waits or is processed was added; 0 if there is none."""
        since = min((*self._dirty.values(), *self._active.values()), default=None)
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def _add(self, key: K, now: float) -> None:
        if key in self._dirty:
            return
        self._dirty[key] = now
        if key not in self._active:
            self._ready.append(key)
            self._wake.set()

    def _expire(self) -> None:
        now = self._clock()
        while (due := self.next_due()) is not None and due <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._timers[key]
            self._add(key, due)
