"""Addresses of an environment's servers: from URLs and the names in them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

_SECONDS = 10.0

_log = logging.getLogger(__name__)


class Address(NamedTuple):
    """Address of one server.

    Attributes:
        url: Base URL, without a slash at its end.
        host: Host header, if it is not the URL's own.
        socket: Path of a Unix socket to connect to, whatever the URL says.
    """

    url: str
    host: str | None = None
    socket: str | None = None


class Addresses(Protocol):
    """A source of the current servers."""

    async def addresses(self) -> Sequence[Address]:
        """List the servers that may get requests; empty if there are none now."""
        ...

    async def close(self) -> None:
        """End what the source has started."""
        ...


class UrlAddresses:
    """Servers of some base URLs: with http, each address of a host name is one of them; with https, the name is."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(dict.fromkeys(url.rstrip("/") for url in urls))
        self._last: dict[str, Sequence[Address]] = {}

    async def addresses(self) -> Sequence[Address]:
        return [address for url in self._urls for address in await self._of(url)]

    async def close(self) -> None:
        pass

    async def _of(self, url: str) -> Sequence[Address]:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        if parts.scheme != "http" or _is_literal(host):
            return [Address(url)]
        try:
            async with asyncio.timeout(_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except TimeoutError:
            _log.warning("%s: no response from DNS within %g s", host, _SECONDS)
            return self._last.get(url, ())
        except socket.gaierror as error:
            # A headless Service without a ready pod has no DNS name.
            if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
                return ()
            _log.warning("%s: %s", host, error)
            return self._last.get(url, ())
        hosts = sorted({f"[{at[0]}]" if family == socket.AF_INET6 else str(at[0]) for family, *_, at in found})
        self._last[url] = [Address(f"http://{at}:{port}{parts.path}", parts.netloc) for at in hosts]
        return self._last[url]


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
