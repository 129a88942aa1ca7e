"""The first message of TLS: for which host it is meant.

A ClientHello is not encrypted (RFC 8446, 4.1.2; RFC 6066, 3 for the name). What does not follow the grammar to the last
byte is refused, so that nothing can be read here otherwise than at the server: two names, two extensions of a kind,
lengths that do not meet, bytes behind the message. Of a hello with an encrypted one within (ECH) the outer name counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_BYTES: Final = 64 << 10
"""Size of a ClientHello, with the heads of its records; today's have up to some 2 KiB."""

_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_HOST_NAME: Final = 0
_MOST_RECORD_BYTES: Final = 1 << 14
_SERVER_NAME: Final = 0
_ENCRYPTED: Final = 0xFE0D


class NotTLS(ValueError):
    """Bytes are not the beginning of TLS as a client speaks it."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What a ClientHello says in the open.

    Attributes:
        server_name: The host, as it is written; None: it names none.
        encrypted: True if it holds an encrypted one, or looks as if.
    """

    server_name: str | None
    encrypted: bool


class ClientHelloReader:
    """Reads a ClientHello from bytes that come in pieces; each byte is looked at once."""

    def __init__(self) -> None:
        self._size = 0
        self._unread = bytearray()
        self._message = bytearray()

    def feed(self, data: bytes) -> ClientHello | None:
        """Take the next piece; None: more is needed.

        What follows the hello may be in the piece, and is not looked at.

        Raises:
            NotTLS: This will be none.
        """
        self._size += len(data)
        self._unread += data
        start = 0
        while (record := self._record(start)) is not None:
            self._message += record
            start += 5 + len(record)
            if len(self._message) >= 4:
                length = int.from_bytes(self._message[1:4])
                if self._message[0] != _CLIENT_HELLO or length > MOST_BYTES:
                    raise NotTLS("its first message is no ClientHello")
                if len(self._message) > 4 + length:
                    raise NotTLS("another message follows the ClientHello in its record")
                if len(self._message) == 4 + length:
                    return _parse(bytes(self._message[4:]))
        del self._unread[:start]
        if self._size > MOST_BYTES:
            raise NotTLS(f"its ClientHello has more than {MOST_BYTES} bytes")
        return None

    def _record(self, start: int) -> bytes | None:
        """The content of the record that begins there, if it is whole."""
        head = bytes(self._unread[start : start + 5])
        if head[:1] not in (b"", bytes([_HANDSHAKE])) or head[1:2] not in (b"", b"\x03"):
            raise NotTLS("it does not begin with a handshake of TLS")
        if len(head) < 5:
            return None
        length = int.from_bytes(head[3:5])
        if not 0 < length <= _MOST_RECORD_BYTES:
            raise NotTLS("a record is empty or too long")
        content = self._unread[start + 5 : start + 5 + length]
        return bytes(content) if len(content) == length else None


class _Fields:
    """Bytes that are read from front to back."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        """So many bytes."""
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise NotTLS("its ClientHello is cut off")
        self._at += count
        return found

    def number(self, size: int) -> int:
        """A number of so many bytes."""
        return int.from_bytes(self.take(size))

    def vector(self, size: int, least: int = 0) -> bytes:
        """Bytes behind their length, which has so many bytes itself."""
        length = self.number(size)
        if length < least:
            raise NotTLS("a part of its ClientHello is too short")
        return self.take(length)

    def end(self) -> None:
        """Nothing is left."""
        if self:
            raise NotTLS("its ClientHello has bytes too many")


def _parse(body: bytes) -> ClientHello:
    fields = _Fields(body)
    fields.take(2 + 32)
    if len(fields.vector(1)) > 32 or len(fields.vector(2, 2)) % 2:
        raise NotTLS("the session or the cipher suites of its ClientHello are malformed")
    fields.vector(1, 1)
    # Before TLS 1.2 a hello could end here.
    extensions = _Fields(fields.vector(2)) if fields else _Fields(b"")
    fields.end()
    found: dict[int, bytes] = {}
    while extensions:
        kind = extensions.number(2)
        if kind in found:
            raise NotTLS("its ClientHello has an extension twice")
        found[kind] = extensions.vector(2)
    name = _server_name(found[_SERVER_NAME]) if _SERVER_NAME in found else None
    return ClientHello(name, _ENCRYPTED in found)


def _server_name(extension: bytes) -> str:
    fields = _Fields(extension)
    names = _Fields(fields.vector(2, 1))
    fields.end()
    if names.number(1) != _HOST_NAME:
        raise NotTLS("its ClientHello names a server in an unknown way")
    name = names.vector(2, 1)
    # RFC 6066: not more than one name of a type, and there is no other type.
    names.end()
    try:
        return name.decode("ascii")
    except UnicodeDecodeError as error:
        raise NotTLS("the server's name in its ClientHello is not ASCII") from error
