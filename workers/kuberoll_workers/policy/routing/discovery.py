"""Discovery of replicas: from a list, from the Serve app, or by DNS."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Protocol

from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.policy.routing.replica import Address

_SECONDS = 10.0


class Discovery(Protocol):
    """A source of the current replicas."""

    async def addresses(self) -> Sequence[Address]:
        """List the replicas that get requests; empty if there are none now.

        Raises:
            PolicyUnavailable: The list could not be read; the last one remains valid.
        """
        ...


class StaticDiscovery:
    """A fixed list of replicas."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._addresses = [Address(url, url) for url in dict.fromkeys(url.rstrip("/") for url in urls)]

    async def addresses(self) -> Sequence[Address]:
        return self._addresses


class EndpointDiscovery:
    """The replicas that the Serve app lists; the endpoint itself if it lists none."""

    def __init__(self, client: ServeClient, url: str) -> None:
        """`client` sends requests to `url`; the caller opens and closes it."""
        self._client = client
        self._itself = [Address(url.rstrip("/"), url.rstrip("/"))]

    async def addresses(self) -> Sequence[Address]:
        try:
            async with asyncio.timeout(_SECONDS):
                replicas = await self._client.replicas()
        except TimeoutError as error:
            raise PolicyUnavailable(f"no list of replicas within {_SECONDS:g} s") from error
        return [Address(name, url.rstrip("/")) for name, url in replicas] or self._itself


class DnsDiscovery:
    """The addresses of a DNS name, one replica at each."""

    def __init__(self, host: str) -> None:
        """`host` is a name and a port, "name:8000".

        Raises:
            ValueError: It has no port.
        """
        self._name, _, port = host.rpartition(":")
        if not self._name or not port.isdecimal():
            raise ValueError(f"replicas_host: found {host!r}; it is a name and a port, as in policy.example:8000")
        self._port = int(port)

    async def addresses(self) -> Sequence[Address]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_SECONDS):
                found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except TimeoutError as error:
            raise PolicyUnavailable(f"{self._name}: no response from DNS within {_SECONDS:g} s") from error
        except socket.gaierror as error:
            # A headless Service without a ready pod has no DNS name.
            if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
                return []
            raise PolicyUnavailable(f"{self._name}: {error}") from error
        hosts = sorted({f"[{host[0]}]" if family == socket.AF_INET6 else str(host[0]) for family, *_, host in found})
        return [Address(f"{host}:{self._port}", f"http://{host}:{self._port}") for host in hosts]
