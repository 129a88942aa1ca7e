"""The cluster's DNS server: names of Services, over UDP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

Lookup = Callable[[str], list[str] | None]
"""Gives a name's IPv4 addresses; None: there is no such name."""

SUFFIX = ".cluster.local"
TTL_SECONDS = 5


def answer(query: bytes, lookup: Lookup) -> bytes:
    """The answer to a query.

    Raises:
        dns.exception.DNSException: It is no query.
    """
    asked = dns.message.from_wire(query)
    made = dns.message.make_response(asked)
    made.flags |= dns.flags.AA | dns.flags.RA
    question = asked.question[0]
    name = question.name.to_text(omit_final_dot=True).lower()
    addresses = lookup(name.removesuffix(SUFFIX)) if name.endswith((SUFFIX, ".svc")) else None
    if addresses is None:
        made.set_rcode(dns.rcode.NXDOMAIN)
    elif question.rdtype == dns.rdatatype.A and addresses:
        kind = (dns.rdataclass.IN, dns.rdatatype.A)
        made.answer.append(dns.rrset.from_text(question.name, TTL_SECONDS, *kind, *addresses))
    return made.to_wire()


class _Server(asyncio.DatagramProtocol):
    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        self._transport.sendto(answer(data, self._lookup), addr)


async def serve(bound: socket.socket, lookup: Lookup) -> asyncio.DatagramTransport:
    """A server at a socket; whoever started it closes it."""
    bound.setblocking(False)
    made = await asyncio.get_running_loop().create_datagram_endpoint(lambda: _Server(lookup), sock=bound)
    return made[0]
