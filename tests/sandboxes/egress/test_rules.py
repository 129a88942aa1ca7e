"""Which hosts are allowed, and what is no host."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.egress.rules import AllowedHosts, InvalidHost, parse_host, with_port

LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=5).map(".".join)
RULES = AllowedHosts.of(
    [
        "PyPI.org.",
        "*.pythonhosted.org",
        "example.com:8443",
        "10.0.0.5",
        "[2001:db8::1]:8080",
        "bücher.example",
        "2001:db8::2",
    ]
)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("pypi.org", 443),
        ("pypi.org", 80),
        ("PYPI.ORG.", 443),
        ("files.pythonhosted.org", 443),
        ("a.b.pythonhosted.org", 443),
        ("example.com", 8443),
        ("10.0.0.5", 443),
        ("[2001:db8::1]", 8080),
        ("2001:DB8:0::1", 8080),
        ("2001:db8::2", 443),
        ("xn--bcher-kva.example", 443),
    ],
)
def test_what_is_named_is_allowed(host: str, port: int) -> None:
    assert RULES.allows(host, port)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("pypi.org", 22),
        ("pypi.org", 8443),
        ("www.pypi.org", 443),
        ("pypi.org.evil.example", 443),
        ("evilpypi.org", 443),
        ("pythonhosted.org", 443),
        ("evilpythonhosted.org", 443),
        ("files.pythonhosted.org", 25),
        # Who names a port means that one.
        ("example.com", 443),
        ("10.0.0.6", 443),
        ("010.0.0.5", 443),
        ("10.0.5", 443),
        ("0x0a000005", 443),
        ("167772165", 443),
        ("[::ffff:10.0.0.5]", 443),
        ("[2001:db8::1%eth0]", 8080),
        ("pypi.org..", 443),
        ("pypi%2eorg", 443),
        ("pypi.org\0", 443),
        ("pypi.org@evil.example", 443),
        # The sign of paragraphs, and a letter of another alphabet, that look like ASCII to some.
        ("pypi\u3002org", 443),
        ("рypi.org", 443),
        ("bücher.example", 443),
        ("", 443),
    ],
)
def test_nothing_else_is(host: str, port: int) -> None:
    assert not RULES.allows(host, port)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("*", "environments[].sandbox.network: All"),
        ("https://pypi.org/simple", "is a URL; write its host alone: pypi.org"),
        ("pypi.org/simple", "has a path; write its host alone: pypi.org"),
        ("10.0.0.0/8", "is a network; write each address"),
        ("user@pypi.org", "has a user; write its host alone: pypi.org"),
        ("py*.org", "* stands only at the beginning"),
        ("a.*.org", "* stands only at the beginning"),
        ("*.*.org", "* stands only at the beginning"),
        ("*pypi.org", "* stands only at the beginning"),
        ("*.10.0.0.5", "an address has no sub-domains"),
        ("", "is empty"),
        ("pypi.org ", "has spaces"),
        ("pypi.org:", "is no port"),
        ("pypi.org:0", "is no port"),
        ("pypi.org:080", "is no port"),
        ("pypi.org:65536", "is no port"),
        ("pypi.org:https", "is no port"),
        ("pypi.org:443:443", "is no IPv6 address"),
        ("[::1", "is no host"),
        ("pypi..org", "is no host name"),
        (".pypi.org", "is no host name"),
        ("-a.org", "is no host name"),
        ("a" * 64 + ".org", "is no host name"),
        (".".join(["a" * 60] * 5), "is no host name"),
        ("0x7f.1", "is no IPv4 address of four decimal numbers"),
        ("2130706433", "is no IPv4 address of four decimal numbers"),
        ("0177.0.0.1", "is no IPv4 address of four decimal numbers"),
        ("127.1", "is no IPv4 address of four decimal numbers"),
        ("[::ffff:10.0.0.5]", "write 10.0.0.5"),
        ("127.0.0.1:8000", "no machine may reach it"),
        ("169.254.169.254", "no machine may reach it"),
        ("[fd00:ec2::254]", "no machine may reach it"),
        ("0.0.0.0", "no machine may reach it"),
        ("[fe80::1%eth0]", "is no IPv6 address"),
        ("a\u200db.example", "is no international name"),
    ],
)
def test_a_bad_entry_is_named_with_what_to_write(entry: str, words: str) -> None:
    with pytest.raises(InvalidHost) as caught:
        AllowedHosts.of(["pypi.org", entry])
    assert str(caught.value).startswith("environments[].sandbox.network.allowedHosts[1]: ")
    assert words in str(caught.value)


def test_entries_of_one_host_add_up() -> None:
    rules = AllowedHosts.of(["a.org", "a.org:8443", "*.a.org:1", "*.a.org:2"])
    assert [port for port in (1, 2, 80, 443, 8443) if rules.allows("a.org", port)] == [80, 443, 8443]
    assert [port for port in (1, 2, 80, 443, 8443) if rules.allows("b.a.org", port)] == [1, 2]


@given(NAMES, NAMES)
def test_a_name_allows_itself_alone(name: str, other: str) -> None:
    rules = AllowedHosts.of([name])
    assert rules.allows(name, 443)
    assert rules.allows(name.upper() + ".", 80)
    assert rules.allows(other, 443) == (other == name)
    assert not rules.allows(f"{other}.{name}", 443)
    assert not rules.allows(f"{name}.{other}", 443)


@given(NAMES, NAMES)
def test_a_star_allows_what_is_below(domain: str, name: str) -> None:
    rules = AllowedHosts.of([f"*.{domain}"])
    assert rules.allows(f"{name}.{domain}", 443)
    assert not rules.allows(domain, 443)
    assert rules.allows(name, 443) == name.endswith(f".{domain}")
    assert not rules.allows(f"{name}{domain}", 443) or f"{name}{domain}".endswith(f".{domain}")


@given(NAMES, st.integers(1, 65535), st.integers(1, 65535))
def test_a_port_allows_itself_alone(name: str, port: int, other: int) -> None:
    rules = AllowedHosts.of([f"{name}:{port}"])
    assert rules.allows(name, port)
    assert rules.allows(name, other) == (other == port)


@given(st.ip_addresses())
def test_addresses_are_hosts_in_any_usual_form(address: IPv4Address | IPv6Address) -> None:
    assert parse_host(str(address)) == address
    assert parse_host(with_port(address, 1).removesuffix(":1")) == address
    if isinstance(address, IPv6Address):
        assert parse_host(f"[{address.exploded.upper()}]") == address


@given(st.one_of(st.text(), st.text("0123456789abcdefx.:[]%@/*-", max_size=20)), st.integers(0, 70000))
def test_no_text_is_allowed_that_is_not_named(text: str, port: int) -> None:
    rules = AllowedHosts.of(["only.example"])
    assert not rules.allows(text, port) or text.lower().removesuffix(".") == "only.example"


@given(st.one_of(st.text(), st.text("0123456789abcdefx.:[]%@/*-", max_size=20)))
def test_entries_are_rules_or_errors_with_their_place(text: str) -> None:
    try:
        rules = AllowedHosts.of([text])
    except InvalidHost as error:
        assert "allowedHosts[0]: " in str(error)  # noqa: PT017
    else:
        assert len(rules.exact) + len(rules.below) == 1
