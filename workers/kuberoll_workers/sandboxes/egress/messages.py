"""What a request to the proxy means, and what of it is passed on.

h11 parses strictly, and writes what is passed on anew. Refused here is what it would mend, or what two parsers may take
in two ways: a request that ends elsewhere for the server than for the proxy could hide a second one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, TypeAlias

import h11

from kuberoll_workers.sandboxes.egress.rules import FIELD, Host, InvalidHost, parse_host, parse_port, with_port

Headers: TypeAlias = list[tuple[bytes, bytes]]

MOST_HEAD_BYTES: Final = 64 << 10
"""Size of the head of a request, or of a response."""

_MOST_SHOWN: Final = 100
_MOST_REASON: Final = 200

# Lines end with CR LF, none continues the one before (obs-fold, RFC 9112, 5.2), and none holds a NUL.
_MALFORMED: Final = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]|\0")
_ABSOLUTE: Final = re.compile(rb"(?i:http)://([^/?#]*)([/?][^#]*)?")
_AUTHORITY: Final = re.compile(r"(\[[0-9a-fA-F:.]*\]|[^:\[\]]*)(?::(.*))?")
# RFC 9110, 7.6.1, and what is between a client and its proxy.
_HOP_BY_HOP: Final = frozenset(
    {
        *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"proxy-authenticate", b"proxy-authentication-info", b"proxy-authorization", b"proxy-connection"),
    }
)
# A Connection header cannot take away what says where a message goes, and where it ends.
_KEPT: Final = frozenset({b"content-length", b"host"})


class Refusal(Exception):
    """A request that is answered by the proxy.

    Attributes:
        status: HTTP's.
        tried: What is counted, if it is one of hosts that may not be reached.
    """

    def __init__(self, status: HTTPStatus, text: str, *, tried: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.tried = tried

    @classmethod
    def of_host(cls, place: str, why: str) -> Refusal:
        """That a host may not be reached.

        Args:
            place: Host and port, as they may be shown.
        """
        return cls(HTTPStatus.FORBIDDEN, f"KubeRoll does not connect to {place}: {why}", tried=place)

    def answer(self) -> bytes:
        """The response.

        Its reason has the text too: of an answer to CONNECT most programs show nothing else.
        """
        body = f"{self}\n".encode("ascii", "backslashreplace")
        reason = body[:_MOST_REASON].strip()
        return b"HTTP/1.1 %d %b\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (
            self.status,
            reason,
            len(body),
            body,
        )


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request goes."""

    host: Host
    port: int

    def __str__(self) -> str:
        return with_port(self.host, self.port)


def not_allowed(place: object) -> Refusal:
    """That a host is not among those that are allowed."""
    return Refusal.of_host(str(place), f"it is not among {FIELD}. Add it there, in the manifest, if the task needs it.")


def parse_request(head: bytes) -> tuple[h11.Connection, h11.Request]:
    """The request of a head, which ends with an empty line; the connection may be fed its body.

    Raises:
        Refusal: It is malformed, or ambiguous.
    """
    if _MALFORMED.search(head):
        raise _bad("a line of the request does not end with CR LF, or continues another")
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES)
    connection.receive_data(head)
    try:
        request = connection.next_event()
    except h11.RemoteProtocolError as error:
        raise _bad(f"the request is malformed: {error}") from error
    if not isinstance(request, h11.Request):
        raise _bad("there is no request")
    if request.http_version not in (b"1.0", b"1.1"):
        raise Refusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "KubeRoll's proxy speaks HTTP/1.1")
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version != b"1.1"):
        raise _bad("where the body of the request ends is ambiguous")
    if b"upgrade" in names:
        raise Refusal(HTTPStatus.NOT_IMPLEMENTED, "KubeRoll relays no Upgrade; use https, or wss")
    if request.method == b"CONNECT" and (b"transfer-encoding" in names or b"content-length" in names):
        raise _bad("CONNECT has no body")
    return connection, request


def tunnel_of(request: h11.Request) -> Destination:
    """The destination of a CONNECT request.

    Raises:
        Refusal: It names none.
    """
    return _destination(request.target, default=None)


def absolute_of(request: h11.Request) -> tuple[Destination, bytes]:
    """The destination of a request with an absolute URL, and its target at the server.

    Raises:
        Refusal: It has none, or another scheme than http; or its Host is another one.
    """
    found = _ABSOLUTE.fullmatch(request.target)
    if found is None:
        raise _bad("this is a proxy: it takes http://HOST/... and, for https, CONNECT")
    destination = _destination(found[1], default=80)
    check_host(request, destination)
    path = found[2] or b"/"
    return destination, path if path[:1] == b"/" else b"/" + path


def origin_of(request: h11.Request, destination: Destination) -> bytes:
    """The target of a request in a tunnel, which is the server's.

    Raises:
        Refusal: It has none; or its Host is another one.
    """
    if request.target[:1] != b"/" and request.target != b"*":
        raise _bad("a request in a tunnel names a path")
    check_host(request, destination)
    return request.target


def check_host(request: h11.Request, destination: Destination) -> None:
    """Check that a request's Host is where it goes.

    Raises:
        Refusal: It is another one.
    """
    for name, value in request.headers:
        # h11 sees to it that there is one, before HTTP/1.1 at most one.
        if name == b"host" and (named := _destination(value, default=80)) != destination:
            raise Refusal.of_host(str(named), f"it is the Host of a request to {destination}.")


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers of a message without those that are meant for the next hop."""
    found = [(name.lower(), name, value) for name, value in headers]
    named = {
        token.strip().lower() for low, _, value in found if low == b"connection" for token in value.split(b",")
    } - _KEPT
    return [(name, value) for low, name, value in found if low not in _HOP_BY_HOP and low not in named]


def request_to(destination: Destination, target: bytes, request: h11.Request) -> h11.Request:
    """The request that the server gets, for one connection."""
    headers = [item for item in forwarded(request.headers.raw_items()) if item[0].lower() != b"host"]
    host = str(destination).removesuffix(":80").encode()
    framing = [item for item in request.headers if item[0] == b"transfer-encoding"]
    headers = [(b"Host", host), *headers, *framing, (b"Connection", b"close")]
    return h11.Request(method=request.method, target=target, headers=headers)


def response_from(response: h11.Response) -> h11.Response:
    """The response that the client gets, on a connection that it ends.

    Raises:
        Refusal: Where it ends is ambiguous.
    """
    names = {name for name, _ in response.headers}
    if {b"transfer-encoding", b"content-length"} <= names:
        raise Refusal(HTTPStatus.BAD_GATEWAY, "where the body of the server's response ends is ambiguous")
    headers = [*forwarded(response.headers.raw_items()), (b"Connection", b"close")]
    return h11.Response(status_code=response.status_code, headers=headers, reason=response.reason)


def _destination(text: bytes, *, default: int | None) -> Destination:
    """The destination that an authority names.

    Args:
        default: Its port, if it names none; None: it must.
    """
    # latin-1 takes all bytes; what is not ASCII is no host.
    authority = text.decode("latin-1")
    found = _AUTHORITY.fullmatch(authority)
    try:
        if found is None:
            raise InvalidHost(f"{authority!r} is no host and port")
        host, port = found.groups()
        if port is None and default is None:
            raise InvalidHost(f"{authority!r} names no port")
        return Destination(parse_host(host), parse_port(port) if port is not None else default or 0)
    except InvalidHost as error:
        shown = ascii(authority)[1:-1][:_MOST_SHOWN]
        raise Refusal.of_host(shown, f"it is no host and port that {FIELD} could name, such as pypi.org.") from error


def _bad(text: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, f"KubeRoll does not pass this on: {text}")
