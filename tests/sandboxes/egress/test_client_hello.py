"""For whom TLS is meant, of real hellos and of hostile bytes."""

from __future__ import annotations

import functools
import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.egress.client_hello import MOST_BYTES, ClientHello, ClientHelloReader, NotTLS
from tests.sandboxes.egress.outside import hello

REAL = hello("pypi.org")


def vector(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size) + data


def server_name(*names: bytes) -> tuple[int, bytes]:
    return 0, vector(2, b"".join(b"\0" + vector(2, name) for name in names))


def message(*extensions: tuple[int, bytes], suites: bytes = b"\x13\x01", tail: bytes = b"") -> bytes:
    """A ClientHello with these extensions."""
    body = b"\x03\x03" + bytes(32) + vector(1, b"") + vector(2, suites) + vector(1, b"\0")
    body += vector(2, b"".join(struct.pack(">H", kind) + vector(2, data) for kind, data in extensions)) + tail
    return b"\x01" + vector(3, body)


def records(data: bytes, size: int = 1 << 14) -> bytes:
    return b"".join(b"\x16\x03\x01" + vector(2, data[start : start + size]) for start in range(0, len(data), size))


def read(data: bytes, cuts: frozenset[int] | set[int] = frozenset()) -> ClientHello | None:
    """What a reader makes of bytes that are cut there; None: more is needed."""
    reader = ClientHelloReader()
    places = [0, *sorted(cut for cut in cuts if 0 < cut < len(data)), len(data)]
    for start, end in itertools.pairwise(places):
        found = reader.feed(data[start:end])
        if found is not None:
            return found
    return None


@functools.cache
def real(name: str) -> bytes:
    return hello(name)


@given(st.sampled_from(["pypi.org", "a.b.c.example", "xn--bcher-kva.example"]), st.sets(st.integers(1, 600)))
def test_real_hellos_in_pieces(name: str, cuts: set[int]) -> None:
    found = read(real(name), cuts)
    assert found == ClientHello(name, encrypted=False)


def test_a_real_hello_byte_by_byte_needs_its_last_byte() -> None:
    reader = ClientHelloReader()
    assert [reader.feed(bytes([byte])) for byte in REAL[:-1]] == [None] * (len(REAL) - 1)
    found = reader.feed(REAL[-1:])
    assert found is not None
    assert found.server_name == "pypi.org"


def test_a_real_hello_without_a_name() -> None:
    assert read(hello(None)) == ClientHello(None, encrypted=False)


@given(st.integers(1, 600), st.sets(st.integers(1, 2000), max_size=20), st.binary(max_size=50))
def test_a_hello_in_many_records(size: int, cuts: set[int], behind: bytes) -> None:
    found = read(records(REAL[5:], size) + behind, cuts)
    assert found == ClientHello("pypi.org", encrypted=False)


def test_of_an_encrypted_hello_the_outer_name_counts() -> None:
    data = records(message(server_name(b"outer.example"), (0xFE0D, b"\0" + bytes(200))))
    assert read(data) == ClientHello("outer.example", encrypted=True)


def test_a_hello_without_extensions_names_nobody() -> None:
    body = b"\x03\x01" + bytes(32) + vector(1, b"") + vector(2, b"\0\x2f") + vector(1, b"\0")
    assert read(records(b"\x01" + vector(3, body))) == ClientHello(None, encrypted=False)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", id="SSH"),
        pytest.param(b"GET / HTTP/1.1\r\n", id="HTTP"),
        pytest.param(b"\x80\x2e\x01\x00\x02", id="SSL 2"),
        pytest.param(b"\x17\x03\x03\x00\x01\x00", id="data instead of a handshake"),
        pytest.param(b"\x15\x03\x01\x00\x02\x02\x28", id="an alert"),
        pytest.param(b"\x16\x04\x00\x00\x01\x01", id="another version"),
        pytest.param(b"\x16\x03\x01\x00\x00", id="an empty record"),
        pytest.param(b"\x16\x03\x01\x40\x01", id="a record that is too long"),
        pytest.param(records(b"\x02" + vector(3, bytes(40))), id="a ServerHello"),
        pytest.param(records(b"\x01" + (1 << 20).to_bytes(3) + bytes(40)), id="a message that is too long"),
        pytest.param(records(message(server_name(b"a.org")) + b"\0"), id="bytes behind it, in its record"),
        pytest.param(records(message(server_name(b"a.org"), tail=b"\0")), id="bytes behind the extensions"),
        pytest.param(records(message(server_name(b"a.org"), server_name(b"b.org"))), id="two extensions"),
        pytest.param(records(message(server_name(b"a.org", b"b.org"))), id="two names"),
        pytest.param(records(message(server_name())), id="an empty list of names"),
        pytest.param(records(message(server_name(b""))), id="an empty name"),
        pytest.param(records(message((0, vector(2, b"\x01" + vector(2, b"a.org"))))), id="a name of another type"),
        pytest.param(
            records(message((0, vector(2, b"\0" + vector(2, b"a.org")) + b"\0"))), id="bytes behind the names"
        ),
        pytest.param(records(message((0, vector(2, b"\0\x00\x09a.org")))), id="a name that is cut off"),
        pytest.param(records(message(server_name("ä.org".encode()))), id="a name that is not ASCII"),
        pytest.param(records(message(server_name(b"a.org"), suites=b"\x13")), id="half a cipher suite"),
        pytest.param(records(message(server_name(b"a.org"), suites=b"")), id="no cipher suite"),
        pytest.param(b"\x16\x03\x01\x40\x00" + b"\x01\x00\xff\xff" + bytes(MOST_BYTES), id="more than there may be"),
    ],
)
def test_all_else_is_refused(data: bytes) -> None:
    with pytest.raises(NotTLS):
        read(data)


def test_what_comes_slowly_in_tiny_records_is_bounded() -> None:
    # Each record has a byte of a message that is just not too long; with their heads they are.
    reader = ClientHelloReader()
    data = records(b"\x01" + vector(3, bytes(60000)), 1)
    pieces = [data[start : start + 1000] for start in range(0, len(data), 1000)]
    taken = list(itertools.takewhile(lambda piece: _wants_more(reader, piece), pieces))
    assert len(taken) == MOST_BYTES // 1000
    assert len(reader._unread) < 2000


def _wants_more(reader: ClientHelloReader, piece: bytes) -> bool:
    try:
        return reader.feed(piece) is None
    except NotTLS as error:
        assert "more than" in str(error)  # noqa: PT017
        return False


@given(st.binary(max_size=400), st.sets(st.integers(1, 400), max_size=5))
def test_any_bytes_are_a_hello_or_no_tls_or_need_more(data: bytes, cuts: set[int]) -> None:
    for candidate in (data, b"\x16\x03\x01" + vector(2, data), records(b"\x01" + vector(3, data))):
        try:
            found = read(candidate, cuts)
        except NotTLS:
            continue
        assert found is None or isinstance(found, ClientHello)


@given(
    st.lists(st.tuples(st.integers(0, len(REAL) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    st.sets(st.integers(1, 600), max_size=5),
)
def test_a_changed_hello_is_read_alike_however_it_comes(changes: list[tuple[int, int]], cuts: set[int]) -> None:
    data = bytearray(REAL)
    for place, value in changes:
        data[place] = value
    outcomes = []
    for pieces in (set(), cuts):
        try:
            outcomes.append(read(bytes(data), pieces))
        except NotTLS:
            outcomes.append(None)
    # Cut or whole, it means the same; one that waits for more and one that is refused both let nothing through.
    assert outcomes[0] == outcomes[1]
    if outcomes[0] is not None and outcomes[0].server_name is not None:
        assert outcomes[0].server_name.encode() in bytes(data)
