"""Starts of sandboxes: few at a time, those that somebody waits for first."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator


class Reservation:
    """A sandbox that is made before anybody needs it.

    Attributes:
        needed_at: When somebody has come to need it, by the monotonic clock; None: nobody has.
    """

    def __init__(self) -> None:
        self.needed_at: float | None = None
        self._then: list[Callable[[], None]] = []

    def need(self) -> None:
        """Note that somebody needs it from now on."""
        if self.needed_at is None:
            self.needed_at = time.monotonic()
            for act in self._then:
                act()

    @contextlib.contextmanager
    def when_needed(self, act: Callable[[], None]) -> Iterator[None]:
        """Act once it is needed, at once if it is already, unless the block ends before."""
        if self.needed_at is not None:
            act()
            yield
            return
        self._then.append(act)
        try:
            yield
        finally:
            self._then.remove(act)


class Starts:
    """Places of sandboxes that start."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: list[tuple[asyncio.Future[None], Reservation]] = []

    @contextlib.asynccontextmanager
    async def place(self, reservation: Reservation) -> AsyncIterator[None]:
        """Have a place for the time of the block: those that are needed first, and in the order in which they came."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, reservation))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        self._waiting = [entry for entry in self._waiting if not entry[0].done()]
        if not self._waiting:
            self._free += 1
            return
        entry = min(self._waiting, key=lambda waiting: waiting[1].needed_at is None)
        self._waiting.remove(entry)
        entry[0].set_result(None)
