"""Connections of a handle to the server inside its sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kuberoll_workers.network.connections import watch_peer
from kuberoll_workers.sandboxes.errors import SandboxError, SandboxLost
from kuberoll_workers.sandboxes.guest.frames import CHUNK_BYTES, VERSION, Decoder, Header, InvalidFrame, encode
from kuberoll_workers.sandboxes.keys import Key

CONNECT_SECONDS: Final = 20.0
"""Time in which a sandbox must answer a new connection."""

_WINDOW_BYTES: Final = 1 << 20
_UNACKNOWLEDGED_MS: Final = 30_000
_MOST_IDLE: Final = 4
# Of more than 16 connections whose key it has not seen the server closes the oldest; several handles may make some.
_MOST_CONNECTING: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """All that a handle needs to reach its sandbox; plain data, and secret.

    Attributes:
        name: The sandbox's name.
        address: `unix:PATH` or `tcp:HOST:PORT`.
        certificate, private: The key that the sandbox obeys, PEM.
    """

    name: str
    address: str
    certificate: str
    private: str = field(repr=False)

    @property
    def key(self) -> Key:
        """The key."""
        return Key(self.certificate, self.private)


class Connection:
    """A connection, which has one operation at a time.

    Attributes:
        closed: True if it was closed here.
        workdir: Working directory of commands.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = Decoder()
        self._frames: deque[tuple[Header, bytes]] = deque()
        self._window = _WINDOW_BYTES
        self._wider = asyncio.Event()
        self.closed = False
        self.workdir = "/"

    async def send(self, header: Header, payload: bytes = b"") -> None:
        """Send a frame.

        Raises:
            SandboxLost: The connection is gone.
        """
        try:
            self._writer.write(encode(header, payload))
            await self._writer.drain()
        except (OSError, ssl.SSLError) as error:
            raise SandboxLost(f"the connection to the sandbox broke: {error}") from error

    async def send_input(self, data: bytes | memoryview) -> None:
        """Send bytes for the operation's input, as fast as it takes them; somebody must receive meanwhile.

        Raises:
            SandboxLost: The connection is gone.
        """
        view = memoryview(data)
        while view:
            while self._window <= 0:
                self._wider.clear()
                await self._wider.wait()
                if self.closed:
                    raise SandboxLost("the connection to the sandbox is closed")
            piece = bytes(view[: min(CHUNK_BYTES, self._window)])
            self._window -= len(piece)
            await self.send({"kind": "input"}, piece)
            view = view[len(piece) :]

    async def receive(self) -> tuple[Header, bytes]:
        """The next frame; those that only say how much input was taken are not among them.

        Raises:
            SandboxLost: The connection is gone.
        """
        while True:
            while not self._frames:
                try:
                    data = await self._reader.read(CHUNK_BYTES)
                    if not data:
                        raise SandboxLost("the sandbox has closed the connection")
                    self._frames.extend(self._decoder.feed(data))
                except (OSError, ssl.SSLError, InvalidFrame) as error:
                    raise SandboxLost(f"the connection to the sandbox broke: {error}") from error
            header, payload = self._frames.popleft()
            if header["kind"] != "taken":
                return header, payload
            self._window += int(header["bytes"])
            self._wider.set()

    def close(self) -> None:
        """Close it at once; what it has begun ends."""
        self.closed = True
        self._wider.set()
        self._writer.close()
        # Nobody waits for the other side to agree. Python 3.11.2 fails where the connection is gone already.
        with contextlib.suppress(AttributeError):
            self._writer.transport.abort()


async def connect(ticket: Ticket, context: ssl.SSLContext, *, seconds: float = CONNECT_SECONDS) -> Connection:
    """Connect to a sandbox, and show the key that it obeys.

    Args:
        seconds: Time limit.

    Raises:
        SandboxLost: It does not answer, or obeys others.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop, limit=CHUNK_BYTES * 2)
    end: socket.socket | None = None
    try:
        async with asyncio.timeout(seconds):
            end = await _socket(ticket.address)
            protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
            # Who connects is TLS's server: the sandbox, which has no key, checks this side's certificate.
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, end, ssl=context)
            end = None
            connection = Connection(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
            try:
                await connection.send({"kind": "hello", "sandbox": ticket.name})
                header, _ = await connection.receive()
                if header["kind"] != "hello" or header["version"] != VERSION:
                    raise SandboxLost(f"{ticket.name}: {header.get('error', 'another release answers there')}")
                connection.workdir = header["workdir"]
            except BaseException:
                connection.close()
                raise
            return connection
    except TimeoutError as error:
        raise SandboxLost(f"the sandbox {ticket.name} did not answer within {seconds:g} s") from error
    except (OSError, ssl.SSLError) as error:
        raise SandboxLost(f"the sandbox {ticket.name} cannot be reached: {error}") from error
    finally:
        if end is not None:
            end.close()


async def _socket(address: str) -> socket.socket:
    kind, _, place = address.partition(":")
    loop = asyncio.get_running_loop()
    directory = -1
    if kind == "unix":
        # The system takes about a hundred bytes, and directories for temporary files may have more.
        directory = os.open(Path(place).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: Any = f"/proc/self/fd/{directory}/{Path(place).name}"
    else:
        host, _, port = place.rpartition(":")
        host = host.strip("[]")
        end = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        target = (host, int(port))
    try:
        end.setblocking(False)
        await loop.sock_connect(end, target)
        if kind != "unix":
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A command may be silent for hours; its node, when it is gone, for ever.
            watch_peer(end)
            if sys.platform == "linux":
                # Of what was sent and is not acknowledged nobody asks the peer's system.
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    except BaseException:
        end.close()
        raise
    finally:
        if directory >= 0:
            os.close(directory)
    return end


class Pool:
    """Connections to one sandbox that are used again."""

    def __init__(self, ticket: Ticket, context: ssl.SSLContext) -> None:
        self.ticket = ticket
        self._context = context
        self._idle: list[Connection] = []
        self._used: set[Connection] = set()
        self._lost: SandboxLost | None = None
        self._connecting = asyncio.Semaphore(_MOST_CONNECTING)
        self._closed = False

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for one operation, which must be over at the end; otherwise the connection is closed.

        Raises:
            SandboxLost: The sandbox does not answer.
        """
        if self._closed:
            raise SandboxError(f"the sandbox {self.ticket.name} is closed")
        if self._lost is not None:
            raise SandboxLost(str(self._lost)) from self._lost
        if self._idle:
            used = self._idle.pop()
        else:
            async with self._connecting:
                used = await connect(self.ticket, self._context)
        self._used.add(used)
        try:
            yield used
        except BaseException:
            used.close()
            raise
        finally:
            self._used.discard(used)
        if used.closed or self._closed or len(self._idle) >= _MOST_IDLE:
            used.close()
        else:
            self._idle.append(used)

    def lose(self, error: SandboxLost) -> None:
        """Close all of them: what is under way ends with `SandboxLost`, and so does what is to come.

        Args:
            error: Why.
        """
        self._lost = error
        for used in [*self._used, *self._idle]:
            used.close()
        self._idle.clear()

    def close(self) -> None:
        """Close all that are idle; the others are closed when their operation is over."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
