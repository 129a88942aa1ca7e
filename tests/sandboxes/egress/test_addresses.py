"""Where names may lead."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.egress.addresses import Reach, is_public, may_be_private, reach_of
from kuberoll_workers.sandboxes.egress.connecting import own_addresses


@pytest.mark.parametrize(
    "text", ["93.184.215.14", "8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::1"]
)
def test_public(text: str) -> None:
    assert reach_of(ip_address(text)) is Reach.PUBLIC


@pytest.mark.parametrize(
    "text",
    [
        *("10.0.0.5", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "198.18.0.1", "192.0.2.1"),
        *("192.0.0.8", "fd12::1", "fc00::1", "fec0::1", "2001:db8::1", "3fff::1", "2001::1", "64:ff9b:1::a00:5"),
        *("::ffff:10.0.0.5", "64:ff9b::a00:5", "2002:a00:5::1"),
    ],
)
def test_private(text: str) -> None:
    assert reach_of(ip_address(text)) is Reach.PRIVATE


@pytest.mark.parametrize(
    "text",
    [
        *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.170.2", "224.0.0.1"),
        *("255.255.255.255", "240.0.0.1", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
        *("::", "::1", "::127.0.0.1", "fe80::1", "fe80::1%eth0", "2606:4700::1%eth0", "ff02::1", "fd00:ec2::254"),
        *("fd20:ce::254", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
        *("2002:7f00:1::1", "2002:a9fe:a9fe::", "::ffff:0:127.0.0.1", "100::1", "5f00::1"),
    ],
)
def test_never(text: str) -> None:
    assert reach_of(ip_address(text)) is Reach.NEVER


@given(st.ip_addresses())
def test_what_is_public_is_so_for_python_too(address: IPv4Address | IPv6Address) -> None:
    if is_public(address) and address not in ip_network("64:ff9b::/96") and address not in ip_network("2002::/16"):
        assert address.is_global
        assert not address.is_multicast


@given(st.ip_addresses(v=4))
def test_wrapped_addresses_are_what_they_wrap(address: IPv4Address) -> None:
    for wrapped in (
        IPv6Address(0xFFFF << 32 | int(address)),
        IPv6Address(0x64FF9B << 96 | int(address)),
        IPv6Address(0x2002 << 112 | int(address) << 80 | 1),
    ):
        assert reach_of(wrapped) is reach_of(address)
        assert not is_public(wrapped, own={address})


def test_own_addresses_and_a_site_s_own_are_not_public() -> None:
    address = ip_address("93.184.215.14")
    assert is_public(address, {ip_address("10.0.0.1")}, [ip_network("93.184.216.0/24")])
    assert not is_public(address, {address})
    assert not is_public(address, (), [ip_network("93.184.215.0/24")])
    assert may_be_private(ip_address("10.0.0.5"))
    assert not may_be_private(ip_address("10.0.0.5"), {ip_address("10.0.0.5")})
    assert not may_be_private(ip_address("169.254.169.254"))


def test_this_machine_has_addresses() -> None:
    assert ip_address("127.0.0.1") in own_addresses()
