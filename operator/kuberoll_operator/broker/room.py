"""Room in a namespace whose quota is full."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class Room:
    """Those who wait for room: for each that leaves, one of them tries, in the order in which they came.

    If all tried, they would ask the API server as often as there are of them, and one would get in.
    """

    def __init__(self) -> None:
        self._left = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def left(self) -> int:
        """How many have left so far."""
        return self._left

    def leave(self) -> None:
        """Note that somebody has left."""
        self._left += 1
        self._wake()

    def enter(self) -> None:
        """Note that somebody has come in: there may be room for the next one."""
        self._wake()

    async def wait(self, seconds: float, since: int) -> None:
        """Wait until it is one's turn to try.

        Args:
            seconds: One tries after so long in any case.
            since: What `left` was before the last try: who has left since then need not be waited for.
        """
        if self._left != since:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It does not try: it is the next one's turn.
                self._wake()
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(turn)

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
