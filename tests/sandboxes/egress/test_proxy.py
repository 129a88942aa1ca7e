"""A proxy between a hostile machine and real connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from kuberoll_workers.sandboxes.egress.client_hello import MOST_BYTES
from kuberoll_workers.sandboxes.egress.connecting import Connector, resolve
from kuberoll_workers.sandboxes.egress.messages import MOST_HEAD_BYTES
from kuberoll_workers.sandboxes.egress.proxy import OTHERS, EgressProxy, Limits
from kuberoll_workers.sandboxes.egress.rules import AllowedHosts
from tests.sandboxes.egress.outside import (
    PATIENCE_SECONDS,
    PUBLIC,
    Outside,
    hello,
    listening,
    make_certificates,
    read_all,
    recording,
    say,
)

GOOD = "good.example"
CONNECT = b"CONNECT good.example:443 HTTP/1.1\r\nHost: good.example:443\r\n\r\n"
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
ALERT = b"\x15\x03\x01\x00\x02\x02\x70"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
SMALL = Limits(head_seconds=0.2, idle_seconds=0.2)


def get(url: str, *lines: str, host: str = GOOD) -> bytes:
    return "\r\n".join([f"GET {url} HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def said(answer: bytes) -> bytes:
    """The body of an answer."""
    return answer.partition(b"\r\n\r\n")[2]


async def test_a_tunnel_carries_tls_both_ways_and_ends(tmp_path: Path) -> None:
    ca, pem = make_certificates(tmp_path, GOOD)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(10_000):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    outside = Outside()
    outside.put(GOOD, 443, server.sockets[0].getsockname()[1])
    data = bytes(range(256)) * 20_000
    async with server, outside.proxy(GOOD) as (proxy, port), asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CONNECT)
        assert await reader.readuntil(b"\r\n\r\n") == ESTABLISHED
        await writer.start_tls(ssl.create_default_context(cafile=str(ca)), server_hostname=GOOD)

        async def send() -> None:
            writer.write(data)
            await writer.drain()

        sending = asyncio.create_task(send())
        assert await reader.readexactly(len(data)) == data
        await sending
        writer.close()
        await writer.wait_closed()
        assert proxy.moved_bytes > 2 * len(data)
    assert outside.asked == [GOOD]
    assert outside.dialled == [(PUBLIC, 443)]
    assert proxy.refused == {}


async def test_what_is_sent_early_goes_on_too() -> None:
    outside = Outside()
    async with recording(b"server") as (local, received), outside.proxy(GOOD) as (_, port):
        outside.put(GOOD, 443, local)
        answer = await _closing(port, CONNECT + hello(GOOD) + b"more")
        assert answer == ESTABLISHED + b"server"
        assert received == [hello_like(received[0]) + b"more"]


def hello_like(data: bytearray) -> bytearray:
    """As much of bytes as their first record has: each ClientHello is another one."""
    return data[: 5 + int.from_bytes(data[3:5])]


async def _closing(port: int, data: bytes) -> bytes:
    """What is answered to bytes after which nothing follows."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            writer.write(data)
            writer.write_eof()
            return await read_all(reader)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    ("target", "tried"),
    [
        ("evil.example:443", "evil.example:443"),
        ("good.example.evil.example:443", "good.example.evil.example:443"),
        ("good.example:22", "good.example:22"),
        ("good.example:25", "good.example:25"),
        ("good.example:53", "good.example:53"),
        ("93.184.215.14:443", "93.184.215.14:443"),
        ("[2606:4700::1111]:443", "[2606:4700::1111]:443"),
        ("[::ffff:93.184.215.14]:443", "[::ffff:5db8:d70e]:443"),
        ("127.0.0.1:443", "127.0.0.1:443"),
        ("0x7f.1:443", "0x7f.1:443"),
        ("0x5db8d70e:443", "0x5db8d70e:443"),
        ("2130706433:443", "2130706433:443"),
        ("0177.0.0.1:443", "0177.0.0.1:443"),
        ("localhost:443", "localhost:443"),
        ("good%2eexample:443", "good%2eexample:443"),
        ("good.example..:443", "good.example..:443"),
        ("user@good.example:443", "user@good.example:443"),
        # What is to be looked up may be a secret, in pieces.
        ("mzxw6ytb.oi.tunnel.example:443", "mzxw6ytb.oi.tunnel.example:443"),
    ],
)
async def test_a_tunnel_elsewhere_is_refused_and_nobody_is_asked(target: str, tried: str) -> None:
    outside = Outside({name: [[PUBLIC]] for name in ("evil.example", "localhost", GOOD)})
    async with outside.proxy(GOOD) as (proxy, port):
        answer = await say(port, f"CONNECT {target} HTTP/1.1\r\nHost: good.example\r\n\r\n".encode())
        assert status(answer) == 403
        assert tried.encode() in said(answer)
        assert b"environments[].sandbox.network.allowedHosts" in said(answer)
        # What Python's http.client shows of it.
        assert tried.encode() in answer.split(b"\r\n")[0]
        assert proxy.refused == {tried: 1}
    assert outside.asked == []
    assert outside.dialled == []


@pytest.mark.parametrize("target", ["GOOD.Example:443", "good.example.:443"])
async def test_a_name_may_be_written_otherwise(target: str) -> None:
    outside = Outside()
    async with recording(b"server") as (local, _), outside.proxy(GOOD) as (_, port):
        outside.put(GOOD, 443, local)
        answer = await _closing(port, f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode() + hello(GOOD))
        assert answer == ESTABLISHED + b"server"
    assert outside.asked == [GOOD]


@pytest.mark.parametrize(
    ("begun", "tried", "end"),
    [
        (hello("evil.example"), "good.example:443 (TLS for evil.example)", ALERT),
        (hello("other.example"), "good.example:443 (TLS for other.example)", ALERT),
        (hello(None), "good.example:443 (TLS for no host)", ALERT),
        (b"SSH-2.0-x\r\n", "good.example:443 (not TLS)", b""),
        (b"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n", "good.example:443 (not TLS)", b""),
        (b"\x16\x03\x01" + b"\xff" * 40, "good.example:443 (not TLS)", b""),
        (b"\x16\x03\x01\x40\x00\x01\x00\xff\xff" + bytes(MOST_BYTES), "good.example:443 (not TLS)", b""),
    ],
    # A ClientHello is another one each time.
    ids=lambda value: "bytes" if isinstance(value, bytes) else str(value),
)
async def test_a_tunnel_is_for_tls_with_its_own_host(begun: bytes, tried: str, end: bytes) -> None:
    outside = Outside()
    async with recording(b"server") as (local, received), outside.proxy(GOOD, "other.example") as (proxy, port):
        outside.put(GOOD, 443, local)
        answer = await say(port, CONNECT, *(begun[start : start + 1000] for start in range(0, len(begun), 1000)))
        # Nothing of the server's either.
        assert answer == ESTABLISHED + end
        assert proxy.refused == {tried: 1}
    # Closing the proxy has closed its connection.
    assert all(data == b"" for data in received)


async def test_other_ports_are_for_tls_too() -> None:
    outside = Outside()
    async with recording(b"server") as (local, received), outside.proxy(f"{GOOD}:22") as (proxy, port):
        outside.put(GOOD, 22, local)
        answer = await say(port, b"CONNECT good.example:22 HTTP/1.1\r\nHost: x\r\n\r\nSSH-2.0-x\r\n")
        assert answer == ESTABLISHED
        assert proxy.refused == {"good.example:22 (not TLS)": 1}
    assert all(data == b"" for data in received)


@pytest.mark.parametrize(
    "addresses",
    [
        ["10.0.0.5"],
        ["127.0.0.1", "169.254.169.254", "fd12::1", "::1", "fe80::1%eth0"],
        ["::ffff:10.0.0.5", "64:ff9b::a9fe:a9fe", "2002:7f00:1::1"],
        ["0.0.0.0", "224.0.0.1", "nonsense"],
        [],
    ],
)
async def test_a_name_that_leads_inside_is_refused(addresses: list[str]) -> None:
    outside = Outside({GOOD: [addresses]})
    async with outside.proxy(GOOD) as (proxy, port):
        for request in (CONNECT, get("http://good.example/")):
            answer = await say(port, request)
            assert (status(answer), b"administrator" in said(answer)) == ((403, True) if addresses else (502, False))
        assert proxy.refused == ({"good.example:443": 1, "good.example:80": 1} if addresses else {})
    assert outside.dialled == []


async def test_of_many_addresses_only_public_ones_are_connected_to() -> None:
    outside = Outside({GOOD: [["10.0.0.5", "93.184.215.1", "169.254.169.254", PUBLIC]]})
    async with recording(b"server") as (local, _), outside.proxy(GOOD) as (_, port):
        outside.routes[PUBLIC, 443] = local
        assert await _closing(port, CONNECT + hello(GOOD)) == ESTABLISHED + b"server"
    assert outside.dialled == [("93.184.215.1", 443), (PUBLIC, 443)]


async def test_a_name_is_resolved_once_for_a_connection() -> None:
    # DNS rebinding: a public address for whoever checks, and then a private one for whoever connects.
    outside = Outside({GOOD: [[PUBLIC], ["169.254.169.254"]]})
    async with recording(b"server") as (local, _), outside.proxy(GOOD) as (proxy, port):
        outside.routes[PUBLIC, 443] = outside.routes["169.254.169.254", 443] = local
        assert await _closing(port, CONNECT + hello(GOOD)) == ESTABLISHED + b"server"
        assert status(await say(port, CONNECT)) == 403
        assert proxy.refused == {"good.example:443": 1}
    assert outside.asked == [GOOD, GOOD]
    assert outside.dialled == [(PUBLIC, 443)]


async def test_private_addresses_are_those_named_and_the_administrator_s() -> None:
    outside = Outside({"mirror.example": [["10.0.0.7"]], "metadata.example": [["169.254.169.254"]]})
    names = ("10.0.0.5:8443", "mirror.example", "metadata.example")
    async with (
        recording(b"server") as (local, _),
        outside.proxy(*names, private=("*.example", "unlisted.test")) as (_, port),
    ):
        outside.routes = dict.fromkeys([("10.0.0.5", 8443), ("10.0.0.7", 443), ("169.254.169.254", 443)], local)
        # An address has no name in TLS.
        address = await _closing(port, b"CONNECT 10.0.0.5:8443 HTTP/1.1\r\nHost: x\r\n\r\n" + hello(None))
        assert address == ESTABLISHED + b"server"
        name = await _closing(port, b"CONNECT mirror.example:443 HTTP/1.1\r\nHost: x\r\n\r\n" + hello("mirror.example"))
        assert name == ESTABLISHED + b"server"
        assert status(await say(port, b"CONNECT metadata.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")) == 403
        assert status(await say(port, b"CONNECT unlisted.test:443 HTTP/1.1\r\nHost: x\r\n\r\n")) == 403


async def test_its_own_machine_s_public_address_is_not_connected_to() -> None:
    outside = Outside({GOOD: [[PUBLIC]]})
    proxy = EgressProxy(AllowedHosts.of([GOOD]), connector=outside.connector(own={ip_address(PUBLIC)}))
    port = await proxy.open()
    try:
        assert status(await say(port, CONNECT)) == 403
    finally:
        await proxy.close()
    assert outside.dialled == []


async def test_the_system_s_resolver_gives_addresses() -> None:
    assert "127.0.0.1" in await resolve("localhost", 80)


async def test_what_does_not_exist_or_answer_is_no_refusal() -> None:
    outside = Outside({"down.example": [[PUBLIC]]})
    async with outside.proxy("*.example") as (proxy, port):
        missing = await say(port, b"CONNECT missing.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (status(missing), b"Name or service not known" in said(missing)) == (502, True)
        down = await say(port, b"CONNECT down.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(down) == 502
        assert PUBLIC.encode() not in down
        assert proxy.refused == {}


async def test_who_does_not_answer_in_time_is_left() -> None:
    async def dial(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        await asyncio.Event().wait()
        raise AssertionError

    outside = Outside({GOOD: [[PUBLIC]]})
    connector = Connector(resolver=outside.resolve, dialer=dial, own=lambda: ())
    proxy = EgressProxy(AllowedHosts.of([GOOD]), connector=connector, limits=Limits(connect_seconds=0.1))
    port = await proxy.open()
    try:
        assert status(await say(port, CONNECT)) == 504
    finally:
        await proxy.close()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Outside, list[bytearray]]]:
    """An outside with a server of http at port 80 of `good.example`, and what it gets."""
    outside = Outside()
    async with recording(ANSWER) as (local, received):
        outside.put(GOOD, 80, local)
        yield outside, received


async def test_a_request_goes_on_anew(served: tuple[Outside, list[bytearray]]) -> None:
    outside, received = served
    async with outside.proxy(GOOD) as (proxy, port):
        answer = await say(port, get("http://good.example/a?b", "Proxy-Authorization: x", "Accept: */*"))
        assert answer == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
        assert proxy.moved_bytes > len(ANSWER)
    assert received == [b"GET /a?b HTTP/1.1\r\nHost: good.example\r\nAccept: */*\r\nConnection: close\r\n\r\n"]


@pytest.mark.parametrize(
    ("request_bytes", "tried"),
    [
        (get("http://evil.example/", host="evil.example"), "evil.example:80"),
        (get("http://good.example/", host="evil.example"), "evil.example:80"),
        (get("http://evil.example/", host="good.example"), "good.example:80"),
        (get("http://good.example@evil.example/"), "good.example@evil.example"),
        (get("http://good.example:8080/", host="good.example:8080"), "good.example:8080"),
        (get("http://169.254.169.254/latest/meta-data/", host="169.254.169.254"), "169.254.169.254:80"),
        (get("http://[fd00:ec2::254]/", host="[fd00:ec2::254]"), "[fd00:ec2::254]:80"),
        (get("http://0x7f.1/", host="0x7f.1"), "0x7f.1"),
        (get("http://good%2eexample/"), "good%2eexample"),
        (b"GET http://evil.example/ HTTP/1.0\r\n\r\n", "evil.example:80"),
    ],
)
async def test_requests_elsewhere_are_refused_and_nobody_is_asked(
    request_bytes: bytes, tried: str, served: tuple[Outside, list[bytearray]]
) -> None:
    outside, received = served
    async with outside.proxy(GOOD) as (proxy, port):
        answer = await say(port, request_bytes)
        assert status(answer) == 403
        assert tried.encode() in said(answer)
        assert proxy.refused == {tried: 1}
    assert outside.asked == []
    assert received == []


async def test_who_sends_on_hears_the_refusal() -> None:
    async with Outside().proxy(GOOD) as (_, port):
        body = bytes(300_000)
        post = b"POST http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 300000\r\n\r\n"
        assert status(await say(port, post + body)) == 403
        assert status(await say(port, b"CONNECT evil.example:443 HTTP/1.1\r\nHost: x\r\n\r\n" + body)) == 403


async def test_a_request_hides_no_second_one(served: tuple[Outside, list[bytearray]]) -> None:
    outside, received = served
    second = b"GET /secret HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    whole = get("http://good.example/1", "Content-Length: 3") + b"abc"
    chunks = (
        get("http://good.example/2", "Transfer-Encoding: chunked") + b"2;x=y\r\nde\r\n1\r\nf\r\n0\r\nTrailer: 1\r\n\r\n"
    )
    async with outside.proxy(GOOD) as (_, port):
        for request in (whole, chunks):
            assert status(await say(port, request + second)) == 200
        for lines in (
            ["Content-Length: 4", "Transfer-Encoding: chunked"],
            ["Transfer-Encoding: chunked", "Content-Length: 100"],
            ["Content-Length: 0", "Content-Length: 45"],
            ["Transfer-Encoding: identity, chunked"],
            ["X: 1", " Content-Length: 45"],
        ):
            assert status(await say(port, get("http://good.example/", *lines) + b"0\r\n\r\n" + second)) == 400
    assert [data.partition(b"\r\n\r\n")[2] for data in received] == [b"abc", b"3\r\ndef\r\n0\r\n\r\n"]
    assert b"secret" not in b"".join(received)


@pytest.mark.parametrize(
    "body", [b"x\r\n", b"5\r\nhello!\r\n0\r\n\r\n", b"ffffffffffffffffffffff\r\n", b"-1\r\n", b"1\n\nabc\r\n"]
)
async def test_a_malformed_body_is_answered(body: bytes) -> None:
    outside = Outside()
    async with recording() as (local, received), outside.proxy(GOOD) as (_, port):
        outside.put(GOOD, 80, local)
        answer = await say(port, get("http://good.example/", "Transfer-Encoding: chunked") + body)
        assert status(answer) == 400
    assert all(b"0\r\n\r\n" not in data for data in received)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 2 * MOST_HEAD_BYTES,
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"\0\0\0\0",
    ],
)
async def test_a_malformed_response_is_the_server_s_fault(answer: bytes) -> None:
    outside = Outside()
    async with recording(answer) as (local, _), outside.proxy(GOOD) as (_, port):
        outside.put(GOOD, 80, local)
        assert status(await say(port, get("http://good.example/"))) == 502


async def test_a_response_that_breaks_off_is_not_taken_for_the_whole() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        writer.close()

    outside = Outside()
    async with listening(serve) as local, outside.proxy(GOOD) as (_, port):
        outside.put(GOOD, 80, local)
        answer = await say(port, get("http://good.example/"))
        assert status(answer) == 200
        assert not answer.endswith(b"0\r\n\r\n")
        # Nor does it go on with another one.
        assert answer.count(b"HTTP/1.1 ") == 1


async def test_an_old_client_gets_a_body_without_chunks() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"5\r\nhello\r\n0\r\n\r\n")
        writer.close()

    outside = Outside()
    async with listening(serve) as local, outside.proxy(GOOD) as (_, port):
        outside.put(GOOD, 80, local)
        answer = await say(port, b"GET http://good.example/ HTTP/1.0\r\n\r\n")
        assert (status(answer), said(answer)) == (200, b"hello")
        assert b"chunked" not in answer
        newer = await say(port, get("http://good.example/"))
        assert newer.startswith(b"HTTP/1.1 100 ")
        assert newer.endswith(b"5\r\nhello\r\n0\r\n\r\n")


async def test_a_server_may_answer_before_it_has_read_all() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    outside = Outside()
    async with listening(serve) as local, outside.proxy(GOOD) as (_, port):
        outside.put(GOOD, 80, local)
        assert status(await say(port, get("http://good.example/", "Content-Length: 100000000"))) == 413


async def test_http_in_a_tunnel_to_port_80_is_read_as_http(served: tuple[Outside, list[bytearray]]) -> None:
    outside, received = served
    tunnel = b"CONNECT good.example:80 HTTP/1.1\r\nHost: good.example:80\r\n\r\n"
    async with outside.proxy(GOOD) as (proxy, port):
        assert (await say(port, tunnel, get("/a"))).endswith(b"\r\n\r\nok")
        for inner, code in (
            (get("/a", host="evil.example"), 403),
            (get("http://evil.example/", host=GOOD), 400),
            (get("/a", "Content-Length: 1", "Transfer-Encoding: chunked"), 400),
            (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
            (b"SSH-2.0-x\r\n\r\n", 400),
        ):
            answer = await say(port, tunnel + inner)
            assert answer.startswith(ESTABLISHED)
            assert status(answer.removeprefix(ESTABLISHED)) == code
        assert proxy.refused == {"evil.example:80": 1}
    assert [bytes(data) for data in received if data] == [
        b"GET /a HTTP/1.1\r\nHost: good.example\r\nConnection: close\r\n\r\n"
    ]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([], id="nothing"),
        pytest.param([b"GET http://good"], id="half a line"),
        pytest.param([CONNECT[:-2]], id="no empty line"),
        pytest.param([CONNECT], id="a tunnel without a hello"),
        pytest.param([CONNECT, hello(GOOD)[:-1]], id="a hello without its end"),
        pytest.param([CONNECT, hello(GOOD)], id="a tunnel that moves nothing"),
        pytest.param([get("http://good.example/", "Content-Length: 5"), b"abc"], id="half a body"),
        pytest.param([get("http://good.example/")], id="a server that does not answer"),
        pytest.param([b"CONNECT good.example:80 HTTP/1.1\r\nHost: x\r\n\r\n"], id="a tunnel to port 80"),
        pytest.param([b"CONNECT good.example:80 HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /"], id="half a line in it"),
    ],
)
async def test_who_does_not_go_on_is_left(pieces: list[bytes]) -> None:
    outside = Outside()
    async with recording() as (local, _), outside.proxy(GOOD, limits=SMALL) as (proxy, port):
        outside.put(GOOD, 443, local)
        outside.put(GOOD, 80, local)
        assert await say(port, *pieces) in (b"", ESTABLISHED)
        while proxy._serving:
            await asyncio.wait(proxy._serving)


@pytest.mark.parametrize(
    "request_bytes", [CONNECT + hello(GOOD), get("http://good.example/")], ids=["tunnel", "request"]
)
async def test_who_is_gone_is_not_waited_for_as_long(request_bytes: bytes) -> None:
    waiting = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        await waiting.wait()

    outside = Outside()
    limits = Limits(idle_seconds=3600, half_closed_seconds=0.1)
    async with listening(serve) as local, outside.proxy(GOOD, limits=limits) as (proxy, port):
        outside.put(GOOD, 443, local)
        outside.put(GOOD, 80, local)
        assert await _closing(port, request_bytes) in (b"", ESTABLISHED)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while proxy._serving:
                await asyncio.wait(proxy._serving)


@pytest.mark.slow
async def test_who_goes_on_may_take_longer_than_one_may_be_idle() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100_000):
            writer.write(data)
            await writer.drain()

    outside, idle = Outside(), 2.0
    async with listening(echo) as local, outside.proxy(GOOD, limits=Limits(idle_seconds=idle)) as (_, port):
        outside.put(GOOD, 443, local)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begun = hello(GOOD)
        writer.write(CONNECT + begun)
        assert await reader.readexactly(len(ESTABLISHED + begun)) == ESTABLISHED + begun
        loop = asyncio.get_running_loop()
        end = loop.time() + 1.5 * idle
        while loop.time() < end:
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
        writer.transport.abort()


async def test_a_byte_now_and_then_does_not_hold_a_head() -> None:
    async with Outside().proxy(GOOD, limits=SMALL) as (_, port), asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET http://good.example/ HTTP/1.1\r\n")
        while not reader.at_eof():
            try:
                writer.write(b"a: b\r\n")
                await writer.drain()
                async with asyncio.timeout(0.02):
                    assert await reader.read(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                break
        writer.transport.abort()


async def test_heads_are_bounded() -> None:
    async with Outside().proxy(GOOD) as (_, port):
        long = get("http://good.example/", "X: " + "a" * MOST_HEAD_BYTES)
        assert status(await say(port, long)) == 431
        assert status(await say(port, long[:-4] + b"b" * MOST_HEAD_BYTES)) == 431


@pytest.mark.slow
async def test_a_thousand_half_open_connections_leave_a_worker_be() -> None:
    outside = Outside()
    limits = Limits(connections=128, head_seconds=3600)
    async with recording(ANSWER) as (local, _), outside.proxy(GOOD, limits=limits) as (proxy, port):
        outside.put(GOOD, 80, local)
        # One after the other: a full queue of the kernel's may lose some.
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(1000)]
        answers = await asyncio.gather(*(read_all(reader) for reader, _ in opened[128:]))
        assert {status(answer) for answer in answers} == {503}
        assert len(proxy._serving) == 128
        for _, writer in opened:
            writer.transport.abort()
        while proxy._serving:
            await asyncio.wait(proxy._serving)
        assert status(await say(port, get("http://good.example/"))) == 200


async def test_a_connection_that_ends_makes_room() -> None:
    outside = Outside()
    async with recording(ANSWER) as (local, _), outside.proxy(GOOD, limits=Limits(connections=1)) as (proxy, port):
        outside.put(GOOD, 80, local)
        outside.put(GOOD, 443, local)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CONNECT)
        await reader.readuntil(b"\r\n\r\n")
        assert status(await say(port)) == 503
        writer.close()
        while proxy._serving:
            await asyncio.wait(proxy._serving)
        assert status(await say(port, get("http://good.example/"))) == 200


async def test_who_does_not_read_holds_little_and_not_for_ever() -> None:
    sent = 0
    stopped = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        try:
            while sent < 1_000_000_000:
                writer.write(bytes(65536))
                await writer.drain()
                sent += 65536
        finally:
            stopped.set()

    outside = Outside()
    limits = Limits(idle_seconds=0.5)
    async with listening(serve) as local, outside.proxy(GOOD, limits=limits) as (proxy, port):
        outside.put(GOOD, 80, local)
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(get("http://good.example/"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await stopped.wait()
        # As much as the buffers of the sockets and of the streams take.
        assert sent < 100_000_000
        while proxy._serving:
            await asyncio.wait(proxy._serving)
        writer.transport.abort()


async def test_all_that_a_machine_moves_may_be_limited() -> None:
    outside = Outside()
    limits = Limits(total_bytes=1000)
    async with recording(b"x" * 2000) as (local, _), outside.proxy(GOOD, limits=limits) as (proxy, port):
        outside.put(GOOD, 443, local)
        assert await _closing(port, CONNECT + hello(GOOD)) == ESTABLISHED
        answer = await say(port, CONNECT)
        assert (status(answer), b"1000 bytes" in said(answer)) == (403, True)
        assert proxy.moved_bytes > 1000


async def test_what_is_counted_is_bounded() -> None:
    async with Outside().proxy(GOOD) as (proxy, port):
        for index in range(210):
            await say(port, f"CONNECT host-{index}.example:443 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await say(port, b"CONNECT host-0.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert len(proxy.refused) == 201
        assert proxy.refused["host-0.example:443"] == 2
        assert proxy.refused[OTHERS] == 10
        await say(port, b"CONNECT " + b"a" * 60000 + b":443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert max(map(len, proxy.refused)) < 300


async def test_a_pair_of_streams_may_be_served_without_a_port() -> None:
    outside = Outside()
    proxy = EgressProxy(AllowedHosts.of([GOOD]), connector=outside.connector())
    async with recording(ANSWER) as (local, _), listening(proxy.serve) as port:
        outside.put(GOOD, 80, local)
        assert status(await say(port, get("http://good.example/"))) == 200
    await proxy.close()


async def test_closing_ends_all_connections() -> None:
    outside = Outside()
    async with recording(b"server") as (local, _):
        async with outside.proxy(GOOD) as (proxy, port):
            outside.put(GOOD, 443, local)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CONNECT + hello(GOOD))
            assert await reader.readexactly(len(ESTABLISHED) + 6) == ESTABLISHED + b"server"
        assert not proxy._serving
        assert await read_all(reader) == b""
        writer.transport.abort()
