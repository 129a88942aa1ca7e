"""A process that serves one environment over HTTP, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from kuberoll_workers.environments import messages
from kuberoll_workers.environments.outcome import EnvironmentFault
from kuberoll_workers.environments.process_access import ProcessAccess, hide_from_others
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.remote.child_server import REFUSED
from kuberoll_workers.environments.remote.server import (
    IDLE_SECONDS,
    KEEP_ALIVE_SECONDS,
    TIMEOUT_SECONDS,
    EnvironmentServer,
)

DRAIN_SECONDS = 25.0
"""Default time that a stopped server gives open episodes to end; less than Kubernetes' 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A server's environment and settings.

    Attributes:
        host, port: Address to listen at; port 0: any that is free.
        path: Path of a Unix socket to listen at instead.
        processes, spare, token, token_digest, timeout, idle_seconds: As in `EnvironmentServer`.
        drain_seconds: Time that open episodes are given to end when the server is stopped.
    """

    spec: PlainSpec
    access: ProcessAccess = field(default_factory=ProcessAccess)
    host: str = "127.0.0.1"
    port: int = 0
    path: str | None = None
    processes: int = 1
    spare: int = 0
    token: str | None = None
    token_digest: str | None = None
    timeout: float = TIMEOUT_SECONDS
    idle_seconds: float = IDLE_SECONDS
    drain_seconds: float = DRAIN_SECONDS


@contextlib.asynccontextmanager
async def open_server(serving: Serving) -> AsyncIterator[tuple[EnvironmentServer, str]]:
    """A server that listens, and its base URL; it is closed at the end.

    Raises:
        EnvironmentFault: The environment cannot be created.
        OSError: The address cannot be listened at.
    """
    server = EnvironmentServer(
        serving.spec,
        processes=serving.processes,
        spare=serving.spare,
        access=serving.access,
        token=serving.token,
        token_digest=serving.token_digest,
        timeout=serving.timeout,
        idle_seconds=serving.idle_seconds,
    )
    runner = web.AppRunner(server.application(), access_log=None, keepalive_timeout=KEEP_ALIVE_SECONDS)
    try:
        await server.start()
        await runner.setup()
        site: web.BaseSite
        if serving.path is not None:
            site = web.UnixSite(runner, serving.path, backlog=1024)
        else:
            site = web.TCPSite(runner, serving.host, serving.port, backlog=1024, reuse_port=False)
        await site.start()
        yield server, "http://localhost" if serving.path is not None else _url(runner.addresses[0])
    finally:
        await server.close()
        await runner.cleanup()


async def serve(serving: Serving, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, or until the server is asked to shut down.

    A first signal lets open episodes end; a second one ends the server at once.

    Args:
        ready: Called with the base URL when requests are answered.

    Raises:
        EnvironmentFault: The environment cannot be created.
        OSError: The address cannot be listened at.
    """
    loop = asyncio.get_running_loop()
    stopped, ended = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (ended if stopped.is_set() else stopped).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    async with open_server(serving) as (server, url):
        ready(url)
        await _first(stopped.wait(), server.shutdown_requested.wait())
        if stopped.is_set():
            await _first(server.drain(serving.drain_seconds), ended.wait())


async def _first(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def serve_channel(end: socket.socket) -> None:
    """Serve in a worker's child process: the channel brings the settings, and takes a line when requests are answered.

    The settings, with the token, are in no variable and in no file. If the environment cannot be created, the line is
    `REFUSED` and a fault as JSON.
    """
    hide_from_others()
    with end.makefile("rb") as lines:
        serving = msgspec.json.decode(lines.readline(), type=Serving)

    def ready(url: str) -> None:
        end.sendall(f"{url}\n".encode())

    with contextlib.suppress(BrokenPipeError):
        try:
            asyncio.run(serve(serving, ready))
        except EnvironmentFault as fault:
            end.sendall(REFUSED + messages.encode(messages.fault_message(fault)) + b"\n")
    os._exit(0)


def _url(address: Any) -> str:
    host, port = address[0], address[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
