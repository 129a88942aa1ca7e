"""Bytes and messages between a machine and a server.

Nothing is read before what was read has been taken: a slow reader slows its writer down.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import h11

from kuberoll_workers.sandboxes.egress.messages import MOST_HEAD_BYTES, Refusal, response_from

PIECE_BYTES: Final = 64 << 10
# As long as h11 parses, nobody else's turn comes.
_PARSED_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class End:
    """One end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Send bytes, as fast as they are taken.

        Raises:
            OSError: The connection is gone.
        """
        self.writer.write(data)
        await self.writer.drain()

    async def close(self, seconds: float) -> None:
        """Close it, at once if what was sent is not taken in time."""
        try:
            self.writer.close()
            async with asyncio.timeout(seconds):
                await self.writer.wait_closed()
        except OSError:
            pass
        finally:
            self.abort()

    def abort(self) -> None:
        """Close it at once, so that the other side does not take what it has for the whole."""
        self.writer.transport.abort()


class Pace:
    """The time that a connection has to move something."""

    def __init__(self, limit: asyncio.Timeout, seconds: float, half: float, count: Callable[[int], None]) -> None:
        """Begin it.

        Args:
            limit: What ends the connection.
            seconds: Time for which it may move nothing.
            half: The same once a side has closed it, which may wait for the other, or be gone.
            count: Is told how many bytes were moved, whichever way; may raise OSError.
        """
        self._limit = limit
        self._seconds = seconds
        self._half = half
        self._count = count
        self.moved(0)

    def moved(self, count: int) -> None:
        """So many bytes have come: its time begins anew."""
        self._count(count)
        if not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self._seconds)

    def half_close(self) -> None:
        """A side has closed it."""
        self._seconds = min(self._seconds, self._half)
        self.moved(0)


async def tunnel(inside: End, outside: End, pace: Pace) -> None:
    """Copy both ways until both have ended.

    Raises:
        OSError: One of them is gone.
    """
    await _both(_copy(inside, outside, pace), _copy(outside, inside, pace))


async def exchange(inside: End, outside: End, asked: tuple[h11.Connection, h11.Request], pace: Pace) -> None:
    """Pass on one request, and its response, which may begin before the request has ended.

    Args:
        asked: The client's connection, which has had the head of its request, and the request for the server.

    Raises:
        Refusal: The request's body, or the response, is malformed; nothing was answered.
        OSError: A connection is gone, or the response broke off.
    """
    client, request = asked
    server = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_HEAD_BYTES)
    head = server.send(request) or b""
    pace.moved(len(head))
    await outside.send(head)

    async def ask() -> None:
        async for event in _events(client, inside, HTTPStatus.BAD_REQUEST, pace):
            await outside.send(server.send(event) or b"")
        # There is one request on a connection.
        if not await inside.reader.read(1):
            pace.half_close()

    async def respond(asking: asyncio.Task[None]) -> None:
        async for event in _events(server, outside, HTTPStatus.BAD_GATEWAY, pace):
            if isinstance(event, h11.InformationalResponse):
                # HTTP/1.0 knows none.
                if client.their_http_version == b"1.0":
                    continue
            elif isinstance(event, h11.Response):
                event = response_from(event)
            await inside.send(client.send(event) or b"")
        # An answer ends the request, whatever is left of it.
        asking.cancel()

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(respond(group.create_task(ask())))
    except BaseExceptionGroup as errors:
        error = errors.exceptions[0]
        if isinstance(error, Refusal) and client.our_state is not h11.SEND_RESPONSE:
            raise ConnectionAbortedError(str(error)) from error
        raise error from None


async def _events(connection: h11.Connection, end: End, status: HTTPStatus, pace: Pace) -> AsyncIterator[h11.Event]:
    """The events of one message, whose data is joined as far as it has come.

    Raises:
        Refusal: It is malformed; with a status.
    """
    data = bytearray()
    while True:
        try:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                if data:
                    yield h11.Data(data=bytes(data))
                    data.clear()
                piece = await end.reader.read(_PARSED_BYTES)
                pace.moved(len(piece))
                connection.receive_data(piece)
                # A reader that has bytes gives them at once.
                await asyncio.sleep(0)
                continue
        except h11.RemoteProtocolError as error:
            raise Refusal(status, f"KubeRoll does not pass this on: {error}") from error
        if isinstance(event, h11.Data):
            data += event.data
            continue
        if data:
            yield h11.Data(data=bytes(data))
            data.clear()
        if isinstance(event, h11.EndOfMessage):
            # Trailers are between neighbours.
            yield h11.EndOfMessage()
            return
        if not isinstance(event, h11.InformationalResponse | h11.Response):
            raise Refusal(status, "KubeRoll's peer has closed the connection without a message")
        yield event


async def _copy(source: End, sink: End, pace: Pace) -> None:
    while data := await source.reader.read(PIECE_BYTES):
        pace.moved(len(data))
        await sink.send(data)
    if sink.writer.can_write_eof():
        sink.writer.write_eof()
    pace.half_close()


async def _both(*works: Coroutine[Any, Any, None]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
