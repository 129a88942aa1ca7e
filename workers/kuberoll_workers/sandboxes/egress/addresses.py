"""Addresses that a name may lead to.

A name that is allowed may have any address, by mistake or by its owner's will: the one of a service in the cluster, or
the one where clouds hand out credentials. The proxy reaches those, the machine does not; so only public addresses are
connected to, but for what the manifest or the cluster's administrator names.

The networks are IANA's special-purpose registries (RFC 6890 and its updates). They stand here, as what `ipaddress`
takes for private differs between releases of Python, and multicast is "global" in all.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Final, TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network


class Reach(enum.Enum):
    """From where an address is reached: by all, within a site, or by nobody whom the proxy serves."""

    PUBLIC = "public"
    PRIVATE = "private"
    NEVER = "never"


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ip_network(text) for text in texts)


# This host, loopback, link-local (with the metadata of most clouds), multicast, reserved and broadcast; then metadata
# of Alibaba Cloud, Azure and Oracle Cloud, of AWS and Google Cloud.
_NEVER: Final = _networks(
    *("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4"),
    *("100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"),
    *("fd00:ec2::/32", "fd20:ce::/32"),
)
# Of IPv6, documentation, protocols' own (with Teredo), NAT64 of a site, unique local and the former site-local.
_PRIVATE: Final = _networks(
    *("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24"),
    *("192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
    *("2001::/23", "2001:db8::/32", "3fff::/20", "64:ff9b:1::/48", "fc00::/7", "fec0::/10"),
)
_IPV4: Final = IPv4Network("0.0.0.0/0")
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
# Mapped addresses, and NAT64 (RFC 6052): the last 32 bits are an IPv4 address.
_WRAPPERS: Final = (IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))
_SIX_TO_FOUR: Final = IPv6Network("2002::/16")


def unwrapped(address: Address) -> Address:
    """The IPv4 address within an IPv6 address, if it stands for one."""
    if isinstance(address, IPv4Address):
        return address
    if any(address in network for network in _WRAPPERS):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _SIX_TO_FOUR:
        return IPv4Address(int(address) >> 80 & 0xFFFFFFFF)
    return address


def reach_of(address: Address) -> Reach:
    """From where an address is reached, by what it stands for."""
    inner = unwrapped(address)
    if isinstance(inner, IPv6Address) and inner.scope_id is not None:
        return Reach.NEVER
    if _is_in(inner, _NEVER):
        return Reach.NEVER
    if _is_in(inner, _PRIVATE):
        return Reach.PRIVATE
    return Reach.PUBLIC if inner in _IPV4 or inner in _GLOBAL_UNICAST else Reach.NEVER


def is_public(address: Address, own: Collection[Address] = (), inside: Iterable[Network] = ()) -> bool:
    """True if any name may lead to an address.

    Args:
        own: Addresses of the machine that the proxy runs on.
        inside: Networks with public addresses that are a site's own.
    """
    return reach_of(address) is Reach.PUBLIC and not _is_one_of(address, own) and not _is_in(unwrapped(address), inside)


def may_be_private(address: Address, own: Collection[Address] = ()) -> bool:
    """True if a name whose addresses the administrator lets be private may lead to an address."""
    return reach_of(address) is not Reach.NEVER and not _is_one_of(address, own)


def _is_one_of(address: Address, own: Collection[Address]) -> bool:
    return address in own or unwrapped(address) in own


def _is_in(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)
