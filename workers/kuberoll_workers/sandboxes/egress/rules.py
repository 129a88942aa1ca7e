"""Hosts that a machine may reach: what a manifest names, as rules.

Names are compared in their normal form: ASCII (A-labels), lower case, without the dot of the root. An address is only
what is written as one in the usual way; the many other spellings that C libraries take for IPv4 (`0x7f.1`,
`2130706433`, `127.1`, `0177.0.0.1`) are neither names nor addresses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import idna

from kuberoll_workers.sandboxes.egress.addresses import Reach, reach_of

FIELD: Final = "environments[].sandbox.network.allowedHosts"
"""The manifest's field that names hosts."""

DEFAULT_PORTS: Final = frozenset({80, 443})
"""Ports of an entry that names none."""

Host: TypeAlias = str | IPv4Address | IPv6Address
"""A name in its normal form, or an address."""

_MOST_CHARACTERS: Final = 253
_LABEL: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
# As in the URL standard, "ends in a number": such a host is an address or nothing.
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_ENTRY: Final = re.compile(r"(\*\.)?(\[[^\]]*\]|[^:\[\]]*)(?::([^:\[\]]*))?")
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}")


class InvalidHost(ValueError):
    """A text is neither a host's name nor an address; the message says what to write instead."""


def parse_host(text: str) -> Host:
    """The host that a text in ASCII names; an IPv6 address may stand in brackets.

    Raises:
        InvalidHost: It names none.
    """
    if ":" in text:
        try:
            if "%" in text:
                raise ValueError("it has a zone")
            return IPv6Address(text[1:-1] if text[0] == "[" and text[-1] == "]" else text)
        except ValueError as error:
            raise InvalidHost(f"{text!r} is no IPv6 address: {error}") from error
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if not text.isascii() or len(name) > _MOST_CHARACTERS or not all(map(_LABEL.fullmatch, labels)):
        raise InvalidHost(f"{text!r} is no host name: labels of letters, digits and hyphens, with dots between them")
    if not _NUMBER.fullmatch(labels[-1]):
        return name
    try:
        return IPv4Address(name)
    except ValueError as error:
        raise InvalidHost(f"{text!r} is no IPv4 address of four decimal numbers, and a name has no such end") from error


def parse_port(text: str) -> int:
    """The port that a text names.

    Raises:
        InvalidHost: It names none.
    """
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise InvalidHost(f"{text!r} is no port: a number from 1 to 65535")
    return int(text)


def with_port(host: Host, port: int) -> str:
    """A host and port as they stand in a URL."""
    return f"[{host}]:{port}" if isinstance(host, IPv6Address) else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Hosts and ports that are allowed.

    Attributes:
        exact: Ports, by host.
        below: Ports of all sub-domains, by the domain.
    """

    exact: Mapping[Host, frozenset[int]]
    below: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, entries: Iterable[str], *, field: str = FIELD) -> AllowedHosts:
        """Rules from a manifest's entries: `pypi.org`, `*.pythonhosted.org`, `example.com:8443`, `10.0.0.5:8443`.

        An entry without a port allows 80 and 443, one with a port this port alone. `*.` stands for sub-domains of
        any depth, not for the domain itself.

        Args:
            field: The field that has them, for errors.

        Raises:
            InvalidHost: An entry names no host; the message names the entry, and what to write.
        """
        exact: dict[Host, frozenset[int]] = {}
        below: dict[str, frozenset[int]] = {}
        for index, entry in enumerate(entries):
            try:
                wild, host, ports = _parse_entry(entry)
            except InvalidHost as error:
                raise InvalidHost(f"{field}[{index}]: {error}") from error
            if wild:
                below[str(host)] = below.get(str(host), frozenset()) | ports
            else:
                exact[host] = exact.get(host, frozenset()) | ports
        return cls(exact, below)

    def allows(self, host: Host, port: int) -> bool:
        """True if a host may be reached at a port; False for a text that is no host."""
        if isinstance(host, str):
            try:
                host = parse_host(host)
            except InvalidHost:
                return False
        if port in self.exact.get(host, ()):
            return True
        if not isinstance(host, str):
            return False
        labels = host.split(".")
        return any(port in self.below.get(".".join(labels[start:]), ()) for start in range(1, len(labels)))


def _parse_entry(entry: str) -> tuple[bool, Host, frozenset[int]]:
    """Whether an entry stands for sub-domains, its host, and its ports."""
    _check_form(entry)
    if entry.count(":") > 1 and "[" not in entry:
        # An IPv6 address alone.
        return False, _literal(parse_host(entry)), DEFAULT_PORTS
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise InvalidHost(f"{entry!r} is no host; write NAME, *.NAME or NAME:PORT")
    wild, text, port = found.groups()
    if "*" in text:
        raise InvalidHost(f"{entry!r}: * stands only at the beginning, for all sub-domains: *.example.com")
    if not text.isascii():
        try:
            text = idna.encode(text, uts46=True).decode()
        except idna.IDNAError as error:
            raise InvalidHost(f"{entry!r} is no international name: {error}") from error
    host = parse_host(text)
    if not isinstance(host, str):
        if wild:
            raise InvalidHost(f"{entry!r}: an address has no sub-domains; write {text}")
        host = _literal(host)
    return bool(wild), host, DEFAULT_PORTS if port is None else frozenset({parse_port(port)})


def _check_form(entry: str) -> None:
    """Name the mistakes that people make."""
    if entry == "*":
        raise InvalidHost("'*' would be all hosts; say so with environments[].sandbox.network: All")
    if not entry or any(character.isspace() for character in entry):
        raise InvalidHost(f"{entry!r} is empty or has spaces; write a host's name")
    if "://" in entry:
        raise InvalidHost(f"{entry!r} is a URL; write its host alone{_example(entry)}")
    if "/" in entry:
        try:
            ip_network(entry, strict=False)
        except ValueError:
            raise InvalidHost(f"{entry!r} has a path; write its host alone{_example('//' + entry)}") from None
        raise InvalidHost(f"{entry!r} is a network; write each address")
    if "@" in entry:
        raise InvalidHost(f"{entry!r} has a user; write its host alone{_example('//' + entry)}")


def _example(url: str) -> str:
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    return f": {host}" if host else ""


def _literal(address: Host) -> Host:
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        raise InvalidHost(f"{address} is an IPv4 address; write {address.ipv4_mapped}")
    if isinstance(address, IPv4Address | IPv6Address) and reach_of(ip_address(address)) is Reach.NEVER:
        raise InvalidHost(
            f"{address} is no other machine's address, or one where clouds keep credentials: no machine may reach it"
        )
    return address
