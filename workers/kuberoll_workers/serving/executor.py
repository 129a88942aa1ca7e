"""A bounded thread pool for work that would block the event loop."""

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

    A thread cannot be stopped, so each call must end by itself; the size of its input is limited for that. A call that
    still waits when its caller is cancelled or times out never starts, and its place is free at once.
    """

    def __init__(
        self, *, threads: int = THREADS, max_waiting: int = MAX_WAITING, seconds: float = WORK_SECONDS
    ) -> None:
        """Threads are started when they are needed.

        Args:
            max_waiting: Maximum number of calls that wait or run.
            seconds: Time limit of one call, waiting included.
        """
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kuberoll-requests")
        self._most, self._seconds = max_waiting, seconds
        self._pending = 0

    @property
    def pending(self) -> int:
        """Number of calls that wait or run."""
        return self._pending

    async def run(
        self, function: Callable[_Arguments, _Value], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Value:
        """Call the function in a thread; return or raise what it does.

        Raises:
            PolicyUnavailable: Too many calls wait already, or it timed out.
        """
        if self._pending >= self._most:
            raise PolicyUnavailable(f"{self._pending} requests are being prepared already; retry later")
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
        """Cancel waiting calls and start no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _left(self, loop: asyncio.AbstractEventLoop, _: Future[_Value]) -> None:
        # Runs in the worker thread, when the loop may already be closed.
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._free)

    def _free(self) -> None:
        self._pending -= 1
