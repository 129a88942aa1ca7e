"""An event loop in virtual time: where the usual one would wait, its clock jumps to the next timer.

Code that reads the time from its loop needs no change. There is nothing to wait for but timers: threads and sockets
belong to another time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, Final, NoReturn, TypeVar

_Result = TypeVar("_Result")

LONGEST_SECONDS: Final = float(1 << 23)
"""End of virtual time, 97 days: later a float has no nanoseconds, by which asyncio tells whether a timer is due."""


class NothingLeft(RuntimeError):
    """All tasks wait, and no timer is set: they would wait for ever."""


class TimeEnds(RuntimeError):
    """Virtual time has reached `LONGEST_SECONDS`."""


class _Clock(selectors.DefaultSelector):
    """Selector that advances the time instead of waiting.

    Attributes:
        now: Seconds since the loop was created.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            # A signal's handler may have woken the loop.
            if events := super().select(0):
                return events
            raise NothingLeft("all tasks wait for something that no timer brings")
        if timeout > 0:
            self.now += timeout
            if self.now > LONGEST_SECONDS:
                raise TimeEnds(f"the run takes more than {LONGEST_SECONDS:g} s of virtual time")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time` is virtual, and begins at 0."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self._clock.now

    # asyncio's signature is generic.
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
