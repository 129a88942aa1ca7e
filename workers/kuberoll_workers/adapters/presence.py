"""Notices that a server has ended, and with it its sessions, where the server that follows does not say so."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final
from urllib.parse import urlsplit

from kuberoll_workers.adapters.background import BackgroundLoop

_CONNECT_SECONDS: Final = 30.0
_SHORTEST, _LONGEST = 0.05, 0.5
_BRIEF_SECONDS: Final = 1.0


class Presence:
    """An idle connection to a server. If it ends and the server refuses another, the server has ended.

    A server, or a proxy, that closes idle connections accepts the next one: that is no end. Nor is one that follows
    another without a moment in which nobody listens, as behind a load balancer.
    """

    def __init__(self, url: str, loop: BackgroundLoop) -> None:
        """
        Args:
            loop: Where the connection is kept.
        """
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._tried, self._up = asyncio.Event(), asyncio.Event()
        self.ends = 0
        """How often the server has ended."""

    async def watch(self, seconds: float) -> int:
        """Begin to watch the server, unless that was done before; the number of its ends so far.

        Args:
            seconds: Time to wait for a server that is away. A session that began before there is a connection could
                be lost with a server that was never seen.
        """
        await self._loop.run(self._begin(seconds))
        return self.ends

    async def stop(self) -> None:
        """Close the connection."""
        if self._task is not None:
            await self._loop.run(self._end())

    async def _begin(self, seconds: float) -> None:
        if self._task is None:
            self._tried, self._up = asyncio.Event(), asyncio.Event()
            self._task = asyncio.create_task(self._keep())
        await self._tried.wait()
        if not self._up.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._up.wait()

    async def _end(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _keep(self) -> None:
        known, pause, brief = False, _SHORTEST, 0
        clock = asyncio.get_running_loop().time
        while True:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    reader, writer = await asyncio.open_connection(self._host, self._port)
            except OSError:
                self.ends += known
                known = False
            else:
                known, since = True, clock()
                self._up.set()
                self._tried.set()
                with contextlib.suppress(OSError):
                    await reader.read(1)
                self._up.clear()
                writer.close()
                brief = brief + 1 if clock() - since < _BRIEF_SECONDS else 0
                if brief < 2:
                    # At once: a server takes longer to start.
                    pause = _SHORTEST
                    continue
            self._tried.set()
            await asyncio.sleep(pause)
            pause = min(_LONGEST, 2 * pause)
