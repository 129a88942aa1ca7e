"""One time limit for many calls under way.

A timer for each call costs a good part of a turn: it is made, sorted in, cancelled and sorted out again.
Here one timer looks at the calls in the order in which they began, which is the order in which they are due.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final

# The most that a call may be late, as a part of the limit and in seconds.
_PART: Final = 0.01
_MOST_SECONDS: Final = 1.0


class CallLimit:
    """The time limit of the calls of one kind, on one event loop."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is the limit of a call, which ends up to a hundredth of it, and at most a second, later."""
        self.seconds = seconds
        self._late = min(_MOST_SECONDS, seconds * _PART)
        self._due: dict[LimitedCall, float] = {}
        self._looks: asyncio.AbstractEventLoop | None = None

    def begin(self, call: LimitedCall) -> None:
        """Begin to count a call's time."""
        loop = asyncio.get_running_loop()
        self._due[call] = due = loop.time() + self.seconds
        if self._looks is not loop:
            self._look_at(due, loop)

    def end(self, call: LimitedCall) -> None:
        """Count a call's time no longer."""
        self._due.pop(call, None)

    def _look_at(self, due: float, loop: asyncio.AbstractEventLoop) -> None:
        self._looks = loop
        loop.call_at(due + self._late, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looks = None
        now = loop.time()
        while self._due:
            call, due = next(iter(self._due.items()))
            if due > now:
                self._look_at(due, loop)
                return
            del self._due[call]
            call.expire()


class LimitedCall:
    """The context of one call of the present task: like that of `asyncio.timeout`, with the limit of all."""

    __slots__ = ("_cancelling", "_limit", "_task", "expired")

    def __init__(self, limit: CallLimit) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._limit, self._task, self._cancelling = limit, task, task.cancelling()
        self.expired = False

    def expire(self) -> None:
        """End the call."""
        self.expired = True
        self._task.cancel()

    def __enter__(self) -> None:
        self._limit.begin(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the context.

        Raises:
            TimeoutError: The call has exceeded its limit.
        """
        self._limit.end(self)
        # Whoever else cancels the task is not forgotten.
        if self.expired and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error
