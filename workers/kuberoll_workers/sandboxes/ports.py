"""Ports of a sandbox that are reachable from outside, and addresses outside that are reachable from inside."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from kuberoll_workers.sandboxes.connection import Connection, Pool
from kuberoll_workers.sandboxes.errors import SandboxError
from kuberoll_workers.sandboxes.guest.frames import CHUNK_BYTES

_WAITING: Final = 2


class Forward:
    """A port of a sandbox, at an address of this machine."""

    def __init__(self, pool: Pool, port: int) -> None:
        self._pool = pool
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """Listen; returns host and port."""
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def close(self) -> None:
        """Stop, with all connections."""
        if self._server is not None:
            self._server.close()
        await _end(self._tasks)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with self._pool.connection() as connection:
                await connection.send({"kind": "connect", "port": self._port})
                header, _ = await connection.receive()
                if header["kind"] == "open":
                    await _relay(connection, reader, writer)
        except (SandboxError, OSError, asyncio.CancelledError):
            # Its client sees a connection that is closed, as from a program that has ended.
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


class Reverse:
    """An address outside, at a port of a sandbox."""

    def __init__(self, pool: Pool, host: str, port: int) -> None:
        self._pool = pool
        self._host = host
        self._port = port
        self._inside = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, inside: int) -> str:
        """Listen in the sandbox; returns host and port.

        Raises:
            OSError: The port is taken.
        """
        async with self._pool.connection() as connection:
            await connection.send({"kind": "listen", "port": inside})
            header, _ = await connection.receive()
        if "error" in header:
            raise OSError(header["errno"], header["error"])
        self._inside = int(header["port"])
        for _ in range(_WAITING):
            self._wait()
        return f"127.0.0.1:{self._inside}"

    async def close(self) -> None:
        """Stop, with all connections."""
        await _end(self._tasks)

    def _wait(self) -> None:
        task = asyncio.create_task(self._serve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self) -> None:
        """Wait for a connection from inside, and serve it, while another waits for the next one."""
        try:
            async with self._pool.connection() as connection:
                await connection.send({"kind": "accept", "port": self._inside})
                header, _ = await connection.receive()
                if header["kind"] != "open":
                    return
                self._wait()
                try:
                    reader, writer = await asyncio.open_connection(self._host, self._port)
                except OSError:
                    await connection.send({"kind": "kill"})
                    while (await connection.receive())[0]["kind"] != "end":
                        pass
                    return
                try:
                    await _relay(connection, reader, writer)
                finally:
                    writer.transport.abort()
        except SandboxError:
            # Whoever uses the sandbox learns of its end by an operation of his own.
            return


async def _relay(connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy both ways until both have ended."""

    async def inwards() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await connection.send_input(data)
        await connection.send({"kind": "inputEnd"})

    task = asyncio.create_task(inwards())
    try:
        while True:
            header, payload = await connection.receive()
            if header["kind"] == "end":
                return
            try:
                if header["kind"] == "outputEnd":
                    writer.write_eof()
                else:
                    writer.write(payload)
                    await writer.drain()
            except OSError:
                await connection.send({"kind": "kill"})
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    current = asyncio.current_task()
    others = [task for task in tasks if task is not current]
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
