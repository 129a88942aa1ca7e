"""Connections to hosts that are allowed: to the addresses that were checked, and to no others."""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final, TypeAlias

import psutil

from kuberoll_workers.sandboxes.egress.addresses import Address, Network, is_public, may_be_private
from kuberoll_workers.sandboxes.egress.messages import Destination, Refusal
from kuberoll_workers.sandboxes.egress.relay import PIECE_BYTES, End
from kuberoll_workers.sandboxes.egress.rules import AllowedHosts

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Addresses of a name, for a port; raises OSError."""

Dialer: TypeAlias = Callable[[str, int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""A connection to an address and port; raises OSError."""

_MOST_ADDRESSES: Final = 8
# The system's resolver takes a thread for as long as a name's servers are silent: not one of the worker's, and of one
# machine not many.
_THREADS: Final = ThreadPoolExecutor(16, thread_name_prefix="egress-names")
_MOST_RESOLVED: Final = 4


async def resolve(name: str, port: int) -> list[str]:
    """Addresses of a name, as this machine resolves it."""
    ask = functools.partial(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_THREADS, ask)
    return [str(address[0]) for *_, address in found]


async def dial(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to an address."""
    return await asyncio.open_connection(address, port, limit=PIECE_BYTES)


def own_addresses() -> set[Address]:
    """Addresses of this machine's interfaces."""
    return {
        ip_address(address.address.partition("%")[0])
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


class Connector:
    """Connects on behalf of one machine."""

    def __init__(
        self,
        *,
        private: AllowedHosts | None = None,
        inside: Sequence[Network] = (),
        resolver: Resolver = resolve,
        dialer: Dialer = dial,
        own: Callable[[], Collection[Address]] = own_addresses,
    ) -> None:
        """Make it.

        Args:
            private: Names that may have private addresses, by the administrator's will; they must be allowed as well.
            inside: Networks with public addresses to which no other name may lead, such as a cluster's own.
            own: Addresses of the machine that this runs on.
        """
        self._private = private or AllowedHosts.of([])
        self._inside = tuple(inside)
        self._resolver = resolver
        self._dialer = dialer
        self._own = own
        self._resolving = asyncio.Semaphore(_MOST_RESOLVED)

    async def connect(self, destination: Destination, seconds: float) -> End:
        """Connect to a host that is allowed.

        Args:
            seconds: Time limit.

        Raises:
            Refusal: Its name leads to no address that it may lead to; or it does not answer.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._dial(destination, await self._addresses(destination), seconds)
        except TimeoutError as error:
            raise Refusal(HTTPStatus.GATEWAY_TIMEOUT, f"KubeRoll: {destination} does not answer in time") from error
        except (OSError, UnicodeError) as error:
            raise Refusal(HTTPStatus.BAD_GATEWAY, f"KubeRoll cannot connect to {destination}: {_why(error)}") from error

    async def _addresses(self, destination: Destination) -> list[str]:
        if not isinstance(destination.host, str):
            # The manifest names this very address.
            return [str(destination.host)]
        async with self._resolving:
            found = dict.fromkeys(await self._resolver(destination.host, destination.port))
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "it has no address")
        own = self._own()
        addresses = [text for text in found if self._may_lead(destination, text, own)]
        if not addresses:
            raise Refusal.of_host(
                str(destination),
                "its name leads to no public address. Private ones are the cluster's administrator's to allow.",
            )
        return addresses[:_MOST_ADDRESSES]

    def _may_lead(self, destination: Destination, text: str, own: Collection[Address]) -> bool:
        try:
            address = ip_address(text)
        except ValueError:
            return False
        if is_public(address, own, self._inside):
            return True
        return self._private.allows(destination.host, destination.port) and may_be_private(address, own)

    async def _dial(self, destination: Destination, addresses: Sequence[str], seconds: float) -> End:
        failures: list[OSError] = []
        for address in addresses:
            try:
                async with asyncio.timeout(seconds / len(addresses)):
                    return End(*await self._dialer(address, destination.port))
            except OSError as error:
                failures.append(error)
        raise failures[0]


def _why(error: OSError | UnicodeError) -> str:
    """A reason without addresses, which are nothing to the machine."""
    if isinstance(error, socket.gaierror) and error.strerror:
        return error.strerror
    return errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
