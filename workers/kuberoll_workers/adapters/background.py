"""Event loops for connections that outlive a call of an environment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")

# Of all loops, because an environment that has one is pickled before it is used.
_STARTING = threading.Lock()


class BackgroundLoop:
    """An event loop in a thread of its own, which is started on demand.

    The calls of an environment in a process of its own have an event loop each; a connection needs one for its life.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine there; cancelled if the caller is."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._running()))

    def wait(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine there, and block the caller's thread until it has ended."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running()).result()

    def _running(self) -> asyncio.AbstractEventLoop:
        with _STARTING:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="kuberoll-connections", daemon=True).start()
            return self._loop

    def stop(self) -> None:
        """End the thread after what runs now; another call starts a new one."""
        with _STARTING:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None
