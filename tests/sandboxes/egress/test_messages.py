"""What requests mean, and what of them is passed on."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.egress.messages import (
    Refusal,
    absolute_of,
    forwarded,
    origin_of,
    parse_request,
    request_to,
    response_from,
    tunnel_of,
)


def request(line: bytes, *lines: bytes) -> h11.Request:
    return parse_request(b"\r\n".join([line, *lines, b"", b""]))[1]


def refused(line: bytes, *lines: bytes) -> Refusal:
    """The refusal of a request, by any of its parts."""
    with pytest.raises(Refusal) as caught:
        _meaning(line, *lines)
    return caught.value


def _meaning(line: bytes, *lines: bytes) -> object:
    asked = request(line, *lines)
    return tunnel_of(asked) if asked.method == b"CONNECT" else absolute_of(asked)


@pytest.mark.parametrize(
    ("target", "host", "place", "path"),
    [
        (b"http://pypi.org/simple/?a=b", b"pypi.org", "pypi.org:80", b"/simple/?a=b"),
        (b"http://pypi.org", b"pypi.org", "pypi.org:80", b"/"),
        (b"http://pypi.org?a", b"pypi.org", "pypi.org:80", b"/?a"),
        (b"HTTP://PyPI.org.:80/", b"pypi.org:80", "pypi.org:80", b"/"),
        (b"http://pypi.org:8080/", b"PYPI.org.:8080", "pypi.org:8080", b"/"),
        (b"http://[2001:db8::1]:8080/", b"[2001:DB8::1]:8080", "[2001:db8::1]:8080", b"/"),
        (b"http://pypi.org/@evil.example/", b"pypi.org", "pypi.org:80", b"/@evil.example/"),
        (b"http://pypi.org/http://evil.example/", b"pypi.org", "pypi.org:80", b"/http://evil.example/"),
    ],
)
def test_absolute_targets(target: bytes, host: bytes, place: str, path: bytes) -> None:
    asked = request(b"GET " + target + b" HTTP/1.1", b"Host: " + host)
    destination, origin = absolute_of(asked)
    assert (str(destination), origin) == (place, path)


@pytest.mark.parametrize(
    "authority",
    [
        *(b"allowed.example@evil.example", b"allowed.example:80@evil.example", b"allowed.example%2eevil.example"),
        *(b"allowed%00.example", b"allowed.example\\@evil.example", b"allowed.example..", b":80", b"a:b:c"),
        *(b"0x7f.1", b"2130706433", b"0177.0.0.1", b"127.1", b"0x7f000001", b"[::1", b"::1", b"[::1%25eth0]:80"),
        *(b"[127.0.0.1]", b"allowed.example:", b"allowed.example:0", b"allowed.example:+80", b"allowed.example:80:80"),
        *(b"allowed.example:65616", b"*.example:80"),
    ],
)
def test_authorities_that_name_no_host_are_refused_and_counted(authority: bytes) -> None:
    for line in (b"CONNECT %b HTTP/1.1", b"GET http://%b/ HTTP/1.1"):
        refusal = refused(line % authority, b"Host: allowed.example")
        assert refusal.status == 403
        assert refusal.tried == authority.decode().replace("\\", "\\\\")
        assert "environments[].sandbox.network.allowedHosts" in str(refusal)


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        ([b"GET / HTTP/1.1", b"Host: a.org"], 400, "this is a proxy"),
        ([b"GET https://a.org/ HTTP/1.1", b"Host: a.org"], 400, "CONNECT"),
        ([b"GET ftp://a.org/ HTTP/1.1", b"Host: a.org"], 400, "this is a proxy"),
        ([b"GET http:/a.org/ HTTP/1.1", b"Host: a.org"], 400, "this is a proxy"),
        ([b"GET http://a.org/#b HTTP/1.1", b"Host: a.org"], 400, "this is a proxy"),
        ([b"OPTIONS * HTTP/1.1", b"Host: a.org"], 400, "this is a proxy"),
        ([b"CONNECT a.org HTTP/1.1", b"Host: a.org"], 403, "no host and port"),
        ([b"CONNECT http://a.org:443/ HTTP/1.1", b"Host: a.org"], 403, "no host and port"),
        ([b"CONNECT a.org:443 HTTP/1.1", b"Host: a.org", b"Content-Length: 4"], 400, "CONNECT has no body"),
        ([b"GET http://a.org/ HTTP/1.1"], 400, "Host"),
        ([b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b"Host: b.org"], 400, "Host"),
        ([b"GET http://a.org/ HTTP/1.1", b"Host: b.org"], 403, "b.org:80"),
        ([b"GET http://a.org/ HTTP/1.1", b"Host: a.org:81"], 403, "a.org:81"),
        ([b"GET http://a.org/ HTTP/1.1", b"Host: a.org, b.org"], 403, "a.org, b.org"),
        ([b"GET http://a.org/ HTTP/1.0", b"Host: b.org"], 403, "b.org:80"),
        ([b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b"Upgrade: h2c"], 501, "Upgrade"),
        ([b"PRI * HTTP/2.0", b"Host: a.org"], 505, "HTTP/1.1"),
        ([b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b" folded: 1"], 400, "continues another"),
        ([b"GET http://a.org/ HTTP/1.1", b"Host: a.org\nX: 1"], 400, "CR LF"),
        ([b"GET http://a.org/ HTTP/1.1", b"Host: a.org\rX: 1"], 400, "CR LF"),
        ([b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b"X: \0"], 400, "CR LF"),
        ([b"GET http://a.org/ HTTP/1.1", b"Host : a.org"], 400, "illegal header"),
        ([b"GET http://a.org/ HTTP/1.1", b"Host: a.org", b": x"], 400, "illegal header"),
        ([b"GET  http://a.org/ HTTP/1.1", b"Host: a.org"], 400, "illegal request line"),
        ([b"G\xe9T http://a.org/ HTTP/1.1", b"Host: a.org"], 400, "illegal request line"),
        ([b""], 400, "malformed"),
    ],
)  # fmt: skip
def test_what_is_not_passed_on(lines: list[bytes], status: int, words: str) -> None:
    refusal = refused(*lines)
    assert refusal.status == status
    assert words in str(refusal)


@pytest.mark.parametrize(
    "lines",
    [
        [b"Content-Length: 4", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding: chunked", b"Content-Length: 4"],
        [b"Content-Length: 4", b"Content-Length: 5"],
        [b"Content-Length: 4, 5"],
        [b"Content-Length: +4"],
        [b"Content-Length: 4 4"],
        [b"Content-Length: 0x4"],
        [b"Content-Length: -4"],
        [b"Content-Length : 4"],
        [b"Content-Length\t: 4"],
        [b"Content-Length: 4", b"Transfer-Encoding : chunked"],
        [b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding: chunked, identity"],
        [b"Transfer-Encoding: gzip, chunked"],
        [b"Transfer-Encoding: xchunked"],
        [b"Transfer-Encoding: \x0bchunked"],
        [b"Transfer-Encoding:", b" chunked"],
    ],
)
def test_a_body_whose_end_is_ambiguous_is_refused(lines: list[bytes]) -> None:
    refusal = refused(b"POST http://a.org/ HTTP/1.1", b"Host: a.org", *lines)
    assert refusal.status == 400
    assert refused(b"POST http://a.org/ HTTP/1.0", b"Host: a.org", *lines).status == 400


def test_http_1_0_has_no_chunks() -> None:
    assert refused(b"POST http://a.org/ HTTP/1.0", b"Host: a.org", b"Transfer-Encoding: chunked").status == 400


NAMES = [b"Content-Length", b"content-length", b"Transfer-Encoding", b"TRANSFER-ENCODING", b"Content-Length ", b"Host"]
VALUES = [
    b"0",
    b"4",
    b"4, 4",
    b"5",
    b"chunked",
    b"Chunked",
    b"identity",
    b"content-length, host",
    b"a.org",
    b"a.org:80",
]
FRAMING = st.tuples(st.sampled_from([*NAMES, b"X", b"Connection"]), st.sampled_from(VALUES))


@given(st.lists(FRAMING, max_size=5), st.sampled_from([b"1.0", b"1.1"]))
def test_what_is_passed_on_has_one_host_and_one_end(headers: list[tuple[bytes, bytes]], version: bytes) -> None:
    try:
        asked = request(b"POST http://a.org/x HTTP/" + version, *(name + b": " + value for name, value in headers))
        destination, target = absolute_of(asked)
    except Refusal:
        return
    head = h11.Connection(h11.CLIENT).send(request_to(destination, target, asked))
    assert head is not None
    names = [line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:-2]]
    assert names.count(b"host") == names.count(b"connection") == 1
    assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
    had = {name.lower() for name, _ in headers}
    assert (b"content-length" in names) == (b"content-length" in had)
    assert (b"transfer-encoding" in names) == (b"transfer-encoding" in had)


def test_headers_for_the_next_hop_stay() -> None:
    asked = request(
        b"GET http://a.org:8080/x HTTP/1.1",
        *(b"Host: a.org:8080", b"Connection: X-Secret, Content-Length, Host", b"X-Secret: 1", b"X-Other: 2"),
        *(b"Proxy-Authorization: Basic x", b"Proxy-Connection: keep-alive", b"TE: trailers", b"Keep-Alive: 1"),
        *(b"Content-Length: 0", b"Expect: 100-continue"),
    )
    destination, target = absolute_of(asked)
    passed = request_to(destination, target, asked)
    assert passed.headers.raw_items() == [
        (b"Host", b"a.org:8080"),
        (b"X-Other", b"2"),
        (b"Content-Length", b"0"),
        (b"Expect", b"100-continue"),
        (b"Connection", b"close"),
    ]
    assert passed.target == b"/x"


def test_a_response_says_that_it_is_the_last() -> None:
    response = h11.Response(
        status_code=200, reason=b"Fine", headers=[(b"Keep-Alive", b"5"), (b"Content-Length", b"3"), (b"X", b"1")]
    )
    passed = response_from(response)
    assert (passed.status_code, passed.reason) == (200, b"Fine")
    assert list(passed.headers) == [(b"content-length", b"3"), (b"x", b"1"), (b"connection", b"close")]
    both = h11.Response(status_code=200, headers=[(b"Content-Length", b"3"), (b"Transfer-Encoding", b"chunked")])
    with pytest.raises(Refusal, match="ambiguous"):
        response_from(both)


def test_a_request_in_a_tunnel_is_for_its_destination() -> None:
    destination = tunnel_of(request(b"CONNECT a.org:80 HTTP/1.1", b"Host: whatever"))
    assert origin_of(request(b"GET /x HTTP/1.1", b"Host: A.org"), destination) == b"/x"
    with pytest.raises(Refusal, match=r"b\.org:80"):
        origin_of(request(b"GET /x HTTP/1.1", b"Host: b.org"), destination)
    with pytest.raises(Refusal, match="names a path"):
        origin_of(request(b"GET http://b.org/x HTTP/1.1", b"Host: a.org"), destination)


@given(st.text(st.characters(max_codepoint=0x2FF), max_size=400))
def test_answers_are_responses_whatever_they_name(place: str) -> None:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=b"GET", target=b"/", headers=[(b"Host", b"a.org")]))
    client.receive_data(Refusal.of_host(ascii(place)[1:-1], "no.").answer())
    response = client.next_event()
    assert isinstance(response, h11.Response)
    assert response.status_code == 403
    body = client.next_event()
    assert isinstance(body, h11.Data)
    assert body.data.endswith(b"no.\n")
    assert isinstance(client.next_event(), h11.EndOfMessage)


def test_forwarded_keeps_order_and_case() -> None:
    assert forwarded([(b"B", b"1"), (b"a", b"2"), (b"B", b"3")]) == [(b"B", b"1"), (b"a", b"2"), (b"B", b"3")]
