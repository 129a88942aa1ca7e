"""The HTTP proxy that is the only way out of one machine.

https, and whatever else is TLS, goes through tunnels (CONNECT), of which the first bytes say for which host they are;
http goes request by request, each on a connection of its own. It is decided before anything is resolved, and what was
resolved is connected to: a name is asked for once, and only if it is allowed.

What it cannot see is within TLS: a server of many hosts may answer for another one than its certificate was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import h11

from kuberoll_workers.sandboxes.egress.client_hello import ClientHello, ClientHelloReader, NotTLS
from kuberoll_workers.sandboxes.egress.connecting import Connector
from kuberoll_workers.sandboxes.egress.messages import (
    MOST_HEAD_BYTES,
    Destination,
    Refusal,
    absolute_of,
    not_allowed,
    origin_of,
    parse_request,
    request_to,
    tunnel_of,
)
from kuberoll_workers.sandboxes.egress.relay import PIECE_BYTES, End, Pace, exchange, tunnel
from kuberoll_workers.sandboxes.egress.rules import AllowedHosts, InvalidHost, parse_host

OTHERS: Final = "others"
"""Key of refusals that are not counted by their host."""

_MOST_REFUSED: Final = 200
_MOST_TRIED_CHARACTERS: Final = 400
_HANDSHAKE: Final = b"\x16"
_ESTABLISHED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"
# A fatal alert, unrecognized_name (RFC 6066, 3): clients say so.
_UNRECOGNIZED_NAME: Final = b"\x15\x03\x01\x00\x02\x02\x70"
# So long, and so much of a request that is refused is read, so that its answer is.
_LINGER_SECONDS: Final = 1.0
_LINGER_PIECES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one machine may take.

    Attributes:
        connections: At a time; another one is answered 503.
        head_seconds: Time for the head of a request, and for a ClientHello.
        connect_seconds: Time to resolve a name and to connect.
        idle_seconds: Time for which a connection may move nothing.
        half_closed_seconds: The same, if one side has closed it.
        total_bytes: All that is passed on, both ways; None: no limit.
    """

    connections: int = 128
    head_seconds: float = 10.0
    connect_seconds: float = 15.0
    idle_seconds: float = 300.0
    half_closed_seconds: float = 30.0
    total_bytes: int | None = None


class EgressProxy:
    """The proxy of one machine.

    Attributes:
        refused: How often what was refused, by host and port; bounded, the rest as `OTHERS`.
        moved_bytes: What was passed on, both ways.
    """

    def __init__(
        self,
        allowed: AllowedHosts,
        *,
        connector: Connector | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Make it; it serves once it is opened, or by `serve`.

        Args:
            connector: Its own, as it bounds what one machine may take.
        """
        self._allowed = allowed
        self._connector = connector or Connector()
        self._limits = limits or Limits()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.refused: dict[str, int] = {}
        self.moved_bytes = 0

    async def open(self) -> int:
        """Listen on loopback; returns the port."""
        self._server = await asyncio.start_server(self.serve, "127.0.0.1", 0, limit=PIECE_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop, with all connections."""
        if self._server is not None:
            self._server.close()
        await self._end_all()

    async def restrict(self, allowed: AllowedHosts) -> None:
        """Let only these hosts be reached from now on; connections that there are end."""
        self._allowed = allowed
        await self._end_all()

    async def _end_all(self) -> None:
        while others := self._serving - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection from the machine, and close it."""
        inside = End(reader, writer)
        task = asyncio.current_task()
        assert task is not None
        if len(self._serving) >= self._limits.connections:
            writer.write(Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "KubeRoll: too many connections at a time").answer())
            writer.close()
            return
        self._serving.add(task)
        try:
            await self._serve(inside)
            await inside.close(self._limits.idle_seconds)
        except (OSError, asyncio.CancelledError):
            # A side is gone or too slow, or the proxy is closed: so is the connection, and asyncio's server would
            # report a task that was cancelled.
            pass
        finally:
            self._serving.discard(task)
            inside.abort()

    async def _serve(self, inside: End) -> None:
        try:
            async with asyncio.timeout(self._limits.head_seconds):
                read = await _read_head(inside.reader, b"")
            if read is not None:
                head, rest = read
                await self._answer(inside, head, rest)
        except Refusal as refusal:
            if refusal.tried is not None:
                self._count(refusal.tried)
            await _refuse(inside, refusal)

    async def _answer(self, inside: End, head: bytes, rest: bytes) -> None:
        """Do what a request asks for.

        Raises:
            Refusal: It may not be.
        """
        connection, request = parse_request(head)
        if request.method == b"CONNECT":
            await self._tunnel(inside, tunnel_of(request), rest)
            return
        destination, target = absolute_of(request)
        async with self._reach(destination) as outside:
            await self._exchange(inside, outside, (connection, request_to(destination, target, request)), rest)

    async def _tunnel(self, inside: End, destination: Destination, begun: bytes) -> None:
        async with self._reach(destination) as outside:
            await inside.send(_ESTABLISHED)
            async with asyncio.timeout(self._limits.head_seconds):
                begun = begun or await inside.reader.read(PIECE_BYTES)
                # http that its client, such as Node's fetch, sends through a tunnel.
                is_http = destination.port == 80 and begun[:1] != _HANDSHAKE
                if is_http:
                    read = await _read_head(inside.reader, begun)
                else:
                    begun = await self._check_hello(inside, destination, begun)
            if is_http and read is not None:
                connection, request = parse_request(read[0])
                target = origin_of(request, destination)
                await self._exchange(inside, outside, (connection, request_to(destination, target, request)), read[1])
            elif not is_http and begun:
                async with self._paced() as pace:
                    pace.moved(len(begun))
                    await outside.send(begun)
                    await tunnel(inside, outside, pace)

    async def _exchange(
        self, inside: End, outside: End, asked: tuple[h11.Connection, h11.Request], read: bytes
    ) -> None:
        """Pass on a request and its response.

        Args:
            read: What was read of it, beyond its head.
        """
        if read:
            # For h11, no bytes are the end of the connection.
            asked[0].receive_data(read)
        async with self._paced() as pace:
            pace.moved(len(read))
            await exchange(inside, outside, asked, pace)

    async def _check_hello(self, inside: End, destination: Destination, begun: bytes) -> bytes:
        """The first bytes of a tunnel, if they are a ClientHello for its destination; none: it has ended."""
        hello_reader = ClientHelloReader()
        read = bytearray()
        try:
            while True:
                if not begun:
                    return b""
                read += begun
                hello = hello_reader.feed(begun)
                if hello is not None:
                    break
                begun = await inside.reader.read(PIECE_BYTES)
        except NotTLS:
            self._count(f"{destination} (not TLS)")
            return b""
        if _is_for(hello, destination):
            return bytes(read)
        # What was tried is the name, if there is one.
        self._count(f"{destination} (TLS for {ascii(hello.server_name)[1:-1] if hello.server_name else 'no host'})")
        await inside.send(_UNRECOGNIZED_NAME)
        return b""

    @contextlib.asynccontextmanager
    async def _reach(self, destination: Destination) -> AsyncIterator[End]:
        """A connection to a destination, which is closed at the end.

        Raises:
            Refusal: It may not be, or cannot be.
        """
        if not self._allowed.allows(destination.host, destination.port):
            raise not_allowed(destination)
        most = self._limits.total_bytes
        if most is not None and self.moved_bytes >= most:
            raise Refusal(HTTPStatus.FORBIDDEN, f"KubeRoll: this machine has moved the {most} bytes that it may")
        outside = await self._connector.connect(destination, self._limits.connect_seconds)
        try:
            yield outside
            await outside.close(self._limits.idle_seconds)
        finally:
            outside.abort()

    @contextlib.asynccontextmanager
    async def _paced(self) -> AsyncIterator[Pace]:
        """The time of a connection, in which what it moves is counted.

        Raises:
            OSError: It moves nothing, or the machine has moved all that it may.
        """
        async with asyncio.timeout(None) as limit:
            yield Pace(limit, self._limits.idle_seconds, self._limits.half_closed_seconds, self._moved)

    def _moved(self, count: int) -> None:
        self.moved_bytes += count
        most = self._limits.total_bytes
        if most is not None and self.moved_bytes > most:
            raise ConnectionAbortedError(f"the machine has moved the {most} bytes that it may")

    def _count(self, tried: str) -> None:
        tried = tried[:_MOST_TRIED_CHARACTERS]
        key = tried if tried in self.refused or len(self.refused) < _MOST_REFUSED else OTHERS
        self.refused[key] = self.refused.get(key, 0) + 1


def _is_for(hello: ClientHello, destination: Destination) -> bool:
    """True if TLS is meant for a destination; an address needs no name (RFC 6066, 3)."""
    if hello.server_name is None:
        return not isinstance(destination.host, str)
    try:
        return parse_host(hello.server_name) == destination.host
    except InvalidHost:
        return False


async def _read_head(reader: asyncio.StreamReader, begun: bytes) -> tuple[bytes, bytes] | None:
    """The head of a message, and what came behind it; None: the connection has ended.

    Raises:
        Refusal: It is too long.
    """
    read = bytearray(begun)
    looked = 0
    while (end := read.find(b"\r\n\r\n", looked)) < 0:
        if len(read) > MOST_HEAD_BYTES:
            break
        looked = max(0, len(read) - 3)
        piece = await reader.read(PIECE_BYTES)
        if not piece:
            return None
        read += piece
    if not 0 <= end < MOST_HEAD_BYTES:
        raise Refusal(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request's head has {MOST_HEAD_BYTES} bytes at most"
        )
    return bytes(read[: end + 4]), bytes(read[end + 4 :])


async def _refuse(inside: End, refusal: Refusal) -> None:
    """Answer, and read a little of what still comes: a connection with unread bytes takes its answer with it."""
    await inside.send(refusal.answer())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            inside.writer.write_eof()
            for _ in range(_LINGER_PIECES):
                if not await inside.reader.read(PIECE_BYTES):
                    break
