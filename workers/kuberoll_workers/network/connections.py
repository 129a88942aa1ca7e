"""Connections that end when the machine at their other end is gone.

Where a node loses its power or its link, nothing tells the peers of its connections: a request that it had waits for
ever. So the system asks each idle connection's peer whether it is there. Its system answers, however long the process
behind it thinks: slow is not lost.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.connector import AddrInfoType

IDLE_SECONDS: Final = 5
"""Time without traffic after which the peer's system is asked."""
INTERVAL_SECONDS: Final = 3
UNANSWERED: Final = 3
"""Questions without an answer after which the connection is broken."""

# Names of Linux; macOS calls the first one otherwise. A system that has none of them has its own times.
_OPTIONS = (
    (("TCP_KEEPIDLE", "TCP_KEEPALIVE"), IDLE_SECONDS),
    (("TCP_KEEPINTVL",), INTERVAL_SECONDS),
    (("TCP_KEEPCNT",), UNANSWERED),
)


def make_socket(address: AddrInfoType) -> socket.socket:
    """Create a socket whose connection breaks some 15 s after its peer's machine is gone."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    try:
        watch_peer(made)
    except BaseException:
        made.close()
        raise
    return made


def watch_peer(end: socket.socket) -> None:
    """Have a TCP connection break some 15 s after its peer's machine is gone."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for names, value in _OPTIONS:
        option = next((getattr(socket, name) for name in names if hasattr(socket, name)), None)
        if option is not None:
            end.setsockopt(socket.IPPROTO_TCP, option, value)


def tcp_connector(*, limit: int, keepalive_timeout: float = 15.0) -> aiohttp.TCPConnector:
    """Create a connector whose connections are `make_socket`'s.

    Args:
        limit: Maximum number of connections; 0: unlimited.
        keepalive_timeout: Seconds for which an unused connection is kept.
    """
    import aiohttp

    return aiohttp.TCPConnector(limit=limit, keepalive_timeout=keepalive_timeout, socket_factory=make_socket)
