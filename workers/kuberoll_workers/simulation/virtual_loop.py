"""An event loop in virtual time: where the usual one would wait, its clock jumps to the next timer.

Code that reads the time from its loop needs no change. There is nothing to wait for but timers: threads and sockets
belong to another time.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, NoReturn, TypeVar

_Result = TypeVar("_Result")

LONGEST_SECONDS: Final = float(1 << 22)
"""End of virtual time, 48 days: later a float is not within half a nanosecond of each time of an engine."""

_RESOLUTION_SECONDS: Final = 1e-9
_FEW_TIMERS: Final = 100


class NothingLeft(RuntimeError):
    """All tasks wait, and no timer is set: they would wait for ever."""


class TimeEnds(RuntimeError):
    """Virtual time has reached `LONGEST_SECONDS`."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time` is virtual, and begins at 0.

    Timers of the same time come in the order in which they were set. A turn of the loop asks no selector, and compares
    timers as numbers: with asyncio's own, half of a replay's time would go to the loop.
    """

    # asyncio's own queue of callbacks, and its sign to stop.
    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        # Timers with their times, and with a number for those of the same time.
        self._timers: list[tuple[float, int, Any]] = []
        self._set = 0
        self._cancelled_timers = 0
        # A timer was set that comes after the end of virtual time.
        self._endless = False

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self._now

    # asyncio's signatures are generic.
    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See asyncio, but without its checks."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        # As asyncio's own loop does, it notes in the handle whether it is in the queue.
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if when > LONGEST_SECONDS:
            # Time limits without end, of which every turn has one.
            self._endless = True
            return timer
        self._set += 1
        timer._scheduled = True  # type: ignore[attr-defined]
        heapq.heappush(self._timers, (when, self._set, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: Any) -> None:
        if handle._scheduled:
            self._cancelled_timers += 1

    def _run_once(self) -> None:
        """Run what is ready; if nothing is, advance the time to the next timer."""
        timers, ready = self._timers, self._ready
        if self._cancelled_timers > _FEW_TIMERS and 2 * self._cancelled_timers > len(timers):
            timers[:] = [timer for timer in timers if not timer[2].cancelled()]
            heapq.heapify(timers)
            self._cancelled_timers = 0
        if not ready and not self._stopping:
            self._advance()
        until = self._now + _RESOLUTION_SECONDS
        while timers and timers[0][0] < until:
            handle = heapq.heappop(timers)[2]
            handle._scheduled = False
            if handle.cancelled():
                self._cancelled_timers -= 1
            else:
                ready.append(handle)
        for _ in range(len(ready)):
            called = ready.popleft()
            if not called.cancelled():
                called._run()

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
            self._cancelled_timers -= 1
        if not timers and self._endless:
            raise TimeEnds(
                f"the replay takes more than {LONGEST_SECONDS:.0f} s of virtual time: give it a faster engine "
                "or shorter times of environments, starts and weights"
            )
        if not timers:
            raise NothingLeft("all tasks wait for something that no timer brings")
        self._now = max(self._now, timers[0][0])

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]  # noqa: ARG002
        """Refuse: a thread takes real time, so the result would not be the same twice.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(f"threads have no place in virtual time: {func!r}")


def run_virtually(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in an event loop of its own, in virtual time.

    Raises:
        NothingLeft: All tasks wait for something that never comes.
        TimeEnds: It takes longer than virtual time lasts.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
