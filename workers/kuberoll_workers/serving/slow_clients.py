"""Time limits for the headers of requests, in HAProxy and in replicas; and connections that nobody waits at any more.

Neither Ray Serve nor uvicorn, which replicas listen with, has a setting for it, and without a limit a few thousand
unfinished requests would block all others.
"""

from __future__ import annotations

import asyncio
import functools
import shlex
import socket
import sys
from pathlib import Path
from typing import Any, Final

HEADER_SECONDS: Final = 10.0
"""Time limit for the headers of a request, from the start of the connection or the first byte of the request."""

MAX_HEADS: Final = 4096
"""Connections of one process whose headers are awaited; beyond it the oldest are closed early."""

# Connections that came together are read one after the other: none of them is late yet.
_EARLY_SECONDS: Final = 1.0

# Linux's state of a connection whose other end has been closed, before all that it sent was read.
_CLOSE_WAIT: Final = 8


def limit_headers(seconds: float = HEADER_SECONDS, *, most: int = MAX_HEADS) -> None:
    """Make this process's HTTP servers close connections whose request headers do not arrive in time.

    One that its client has closed before it is looked at is closed unread, so that those who open connections and
    leave them at once take little of the time of all.
    """
    import uvicorn.protocols.http.auto as auto
    from uvicorn.protocols.http.h11_impl import H11Protocol

    for protocol in {auto.AutoHTTPProtocol, H11Protocol}:
        _limit(protocol, seconds, most)


def _limit(protocol: Any, seconds: float, most: int = MAX_HEADS) -> None:
    # The oldest first, with the time since when.
    awaited: dict[Any, float] = {}

    def watch(connection: Any) -> None:
        if not _awaits_head(connection):
            stop(connection)
        elif connection not in awaited and not connection.transport.is_closing():
            # The timer is not restarted with each byte, so that a byte every few seconds does not keep the connection.
            connection.kuberoll_head = connection.loop.call_later(seconds, close, connection)
            now = awaited[connection] = connection.loop.time()
            while len(awaited) > most and now - awaited[oldest := next(iter(awaited))] >= _EARLY_SECONDS:
                stop(oldest)
                oldest.transport.abort()

    def stop(connection: Any) -> None:
        if awaited.pop(connection, None) is not None:
            connection.kuberoll_head.cancel()

    def close(connection: Any) -> None:
        awaited.pop(connection, None)
        if _awaits_head(connection):
            connection.transport.abort()

    made, received, lost = protocol.connection_made, protocol.data_received, protocol.connection_lost

    @functools.wraps(made)
    def connection_made(self: Any, transport: asyncio.Transport) -> None:
        if _has_left(transport):
            self.kuberoll_left = True
            transport.abort()
            return
        made(self, transport)
        watch(self)

    @functools.wraps(received)
    def data_received(self: Any, data: bytes) -> None:
        received(self, data)
        watch(self)

    @functools.wraps(lost)
    def connection_lost(self: Any, exc: Exception | None) -> None:
        if not getattr(self, "kuberoll_left", False):
            stop(self)
            lost(self, exc)

    protocol.connection_made, protocol.data_received = connection_made, data_received
    protocol.connection_lost = connection_lost


def _has_left(transport: asyncio.Transport) -> bool:
    """True if the client has closed a connection: no answer could be sent."""
    if sys.platform != "linux":
        return False
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT)


def _awaits_head(connection: Any) -> bool:
    cycle = connection.cycle
    return cycle is None or bool(cycle.response_complete)


def write_haproxy_launcher(path: Path, program: str, *, local_ports: tuple[int, ...]) -> Path:
    """Write a launcher for HAProxy, which adds settings to the configuration that Serve does not offer.

    Args:
        path: File to write.
        program: Path of HAProxy.
        local_ports: Ports that Serve binds to all addresses and that should be bound to loopback.
    """
    edits = [rf"s/^\( *\)timeout client .*/&\n\1timeout http-request {HEADER_SECONDS:g}s/"]
    edits += [rf"s/^\( *\)bind \**:{port} *$/\1bind 127.0.0.1:{port}/" for port in local_ports]
    script = " ".join(f"-e {shlex.quote(edit)}" for edit in edits)
    # Serve starts it as: haproxy -db -f FILE ...
    path.write_text(f'#!/bin/sh\nsed -i {script} "$3"\nexec {shlex.quote(program)} "$@"\n')
    path.chmod(0o700)
    return path
