"""Connections to machines that vanish."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kuberoll_workers.network import connections
from kuberoll_workers.network.connections import make_socket, tcp_connector

HOST, PEER = ipaddress.ip_address("10.217.83.1"), ipaddress.ip_address("10.217.83.2")


@pytest.mark.parametrize(
    ("family", "kind"), [(socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET6, socket.SOCK_STREAM)]
)
def test_each_socket_asks_for_its_peer_within_seconds(family: int, kind: int) -> None:
    try:
        made = make_socket((family, kind, socket.IPPROTO_TCP, "", ("::1", 80)))
    except OSError:
        pytest.skip("this machine has no such addresses")
    with made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
        idle, interval, count = (made.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle + interval * count < 15


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def link() -> Iterator[str]:
    """A network namespace behind a link whose other end is here: its name, which its end of the link has, too."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    name = f"kr{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "peer", "netns", name)
        run("ip", "address", "add", f"{HOST}/30", "dev", name)
        run("ip", "link", "set", name, "up")
        run("ip", "-n", name, "address", "add", f"{PEER}/30", "dev", "peer")
        run("ip", "-n", name, "link", "set", "peer", "up")
        yield name
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            run("ip", "link", "delete", name)
        run("ip", "netns", "delete", name)


SERVER = """
import asyncio
from aiohttp import web

async def hold(_):
    print("held", flush=True)
    await asyncio.Event().wait()

async def main():
    app = web.Application()
    app.router.add_get("/", hold)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 8000).start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def server(name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        "ip", "netns", "exec", name, sys.executable, "-c", SERVER, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        await process.wait()


@pytest.mark.slow
async def test_a_request_to_a_machine_that_is_gone_ends(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_OPTIONS", tuple((names, 1) for names, _ in connections._OPTIONS))
    async with (
        asyncio.timeout(120),
        server(link) as process,
        aiohttp.ClientSession(connector=tcp_connector(limit=1), timeout=aiohttp.ClientTimeout()) as session,
    ):
        asking = asyncio.create_task(session.get(f"http://{PEER}:8000/"))
        assert process.stdout is not None
        assert await process.stdout.readline() == b"held\n"
        # As when a node loses its link: nobody tells this end.
        run("ip", "-n", link, "link", "set", "peer", "down")
        with pytest.raises((aiohttp.ClientError, OSError)):
            await asking
