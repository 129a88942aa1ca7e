"""Threads for work that would hold up an event loop, as many and as long as is said."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from kuberoll_workers.policy.interface import PolicyUnavailable

THREADS: Final = 4
MAX_WAITING: Final = 256
WORK_SECONDS: Final = 30.0

_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")


class BoundedExecutor:
    """A few threads with a queue of bounded length.

    A thread cannot be stopped: what is handed over must end by itself, which is why its input has limits of size. What
    still waits when its caller goes away or has waited too long is never begun, and its place is free at once.
    """

    def __init__(
        self, *, threads: int = THREADS, max_waiting: int = MAX_WAITING, seconds: float = WORK_SECONDS
    ) -> None:
        """Nothing is started before it is needed.

        Args:
            max_waiting: Pieces of work that may be there at once, running ones included.
            seconds: Within which a piece of work must be done, its waiting included.
        """
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kuberoll-requests")
        self._most, self._seconds = max_waiting, seconds
        self._pending = 0

    @property
    def pending(self) -> int:
        """Pieces of work that wait or run."""
        return self._pending

    async def run(
        self, function: Callable[_Arguments, _Value], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Value:
        """What the function returns or raises.

        Raises:
            PolicyUnavailable: Too much waits already, or it was not done in time.
        """
        if self._pending >= self._most:
            raise PolicyUnavailable(f"{self._pending} requests are being prepared already; send it again later")
        loop = asyncio.get_running_loop()
        self._pending += 1
        work = self._pool.submit(functools.partial(function, *args, **kwargs))
        work.add_done_callback(functools.partial(self._left, loop))
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.wrap_future(work)
        except TimeoutError as error:
            raise PolicyUnavailable(f"the request was not prepared within {self._seconds:g} s") from error

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _left(self, loop: asyncio.AbstractEventLoop, _: Future[_Value]) -> None:
        # In the thread that did it, whose loop may have been closed meanwhile.
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._free)

    def _free(self) -> None:
        self._pending -= 1
