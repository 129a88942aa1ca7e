"""Servers that end and come again at their port: what is noticed, and who waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kuberoll_workers.adapters.background import BackgroundLoop
from kuberoll_workers.adapters.http import ServerError, Unreachable, patiently, post
from kuberoll_workers.adapters.presence import Presence
from tests.rollouts.fakes import until


class Listener:
    """Accepts connections at a port, and closes them when it is told so."""

    def __init__(self) -> None:
        self.port = 0
        self.accepted = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.append(writer)

    def has_accepted(self, count: int) -> bool:
        return self.accepted == count

    def drop(self) -> None:
        """Close all connections, as a server closes idle ones."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.drop()


def has_seen(presence: Presence, ends: int) -> bool:
    return presence.ends == ends


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Listener, Presence]]:
    listener, loop = Listener(), BackgroundLoop()
    await listener.start()
    presence = Presence(f"http://127.0.0.1:{listener.port}/path", loop)
    try:
        yield listener, presence
    finally:
        await presence.stop()
        loop.stop()
        with contextlib.suppress(OSError):
            listener.stop()


async def test_each_end_of_a_server_is_counted_once() -> None:
    async with watched() as (listener, presence):
        assert await presence.watch(0.0) == 0
        for number in (1, 2):
            await until(functools.partial(listener.has_accepted, number))
            listener.stop()
            await until(functools.partial(has_seen, presence, number))
            await listener.start()
        await until(lambda: listener.accepted == 3)
        assert await presence.watch(0.0) == 2


async def test_a_server_that_closes_idle_connections_has_not_ended() -> None:
    async with watched() as (listener, presence):
        await presence.watch(0.0)
        for number in range(1, 5):
            await until(functools.partial(listener.has_accepted, number))
            listener.drop()
        await until(lambda: listener.accepted == 5)
        assert presence.ends == 0


async def test_a_server_that_was_never_there_has_not_ended() -> None:
    async with watched() as (listener, presence):
        listener.stop()
        assert await presence.watch(0.0) == 0
        await listener.start()
        await until(lambda: listener.accepted == 1)
        assert presence.ends == 0


async def test_a_session_begins_when_its_server_is_watched() -> None:
    async with watched() as (listener, presence):
        assert await presence.watch(0.0) == 0
        await until(functools.partial(listener.has_accepted, 1))
        listener.stop()
        await until(functools.partial(has_seen, presence, 1))
        # One that is there for a moment only: who has begun a session with it learns of its end.
        waiting = asyncio.create_task(presence.watch(240.0))
        await listener.start()
        assert await waiting == 1
        await until(functools.partial(listener.has_accepted, 2))
        listener.stop()
        await until(functools.partial(has_seen, presence, 2))


async def test_who_is_patient_waits_for_a_server_and_for_nothing_else() -> None:
    listener = Listener()
    await listener.start()
    listener.stop()
    url, tries = f"http://127.0.0.1:{listener.port}", 0

    async def ask() -> int:
        nonlocal tries
        tries += 1
        if tries < 3:
            await post(url, {}, {})
        return tries

    assert await patiently(ask, 240.0) == 3
    tries = 0
    with pytest.raises(Unreachable, match=r"^http://127\.0\.0\.1:\d+: Connection refused$"):
        await patiently(ask, 0.0)
    assert tries == 1

    async def broken() -> None:
        nonlocal tries
        tries += 1
        raise ServerError("broken")

    with pytest.raises(ServerError, match="broken"):
        await patiently(broken, 240.0)
    assert tries == 2
