"""Hosts of a network's allowlist: names, names with a leading wildcard, addresses and ranges of addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address, ip_network

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def normal_hosts(hosts: Iterable[str]) -> list[str]:
    """The hosts in one spelling: lower case, without spaces around and dots at the end, addresses at their shortest.

    Raises:
        ValueError: One is no host; the message names it.
    """
    return [_normal(host) for host in hosts]


def _normal(given: str) -> str:
    host = given.strip().lower().rstrip(".")
    if "/" in host or ":" in host:
        return _address(host, given)
    wildcard = host.startswith("*.")
    name = host[2:] if wildcard else host
    if not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError(
            f"{given!r} is no host: write a name (pypi.org), all names below one (*.pypi.org), an address, or a range "
            "of addresses (10.0.0.0/8); not a URL, a port or a path"
        )
    if wildcard and _is_address(name):
        raise ValueError(f"{given!r}: an address has no names below it; write the range of addresses (10.0.0.0/8)")
    return host


def _address(host: str, given: str) -> str:
    """An address of IPv6 or a range of either kind, at its shortest."""
    try:
        if "%" in host:
            raise ValueError("it has a zone")
        return ip_network(host).compressed if "/" in host else ip_address(host).compressed
    except ValueError as error:
        raise ValueError(
            f"{given!r} is no address and no range of addresses: {error}; no URLs, ports or paths"
        ) from error


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
