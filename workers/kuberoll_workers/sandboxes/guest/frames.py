"""Frames: what goes over a connection between a handle and its sandbox, in both directions.

A frame is eight bytes with the lengths of its header and its payload (big-endian), a header, which is an object of
JSON, and a payload of bytes. A connection has one operation at a time; `hello` is the first:

| from the handle | then from the handle | from the sandbox |
|---|---|---|
| `hello`, `sandbox` | | `hello` |
| `ping` | | `pong` |
| `exec`, `argv` and other arguments | `input` with bytes, `inputEnd`, `kill` | `output` with `stream`, `end` |
| `read`, `path` | | `output` with bytes, `end` |
| `write`, `path` | `input`, `inputEnd` | `end` |
| `unpack`, `path` | `input` with a tar archive, `inputEnd` | `end` |
| `pack`, `path` | | `output` with a tar archive, `end` |
| `make`, `path`, `mode`; `remove`, `path` | | `end` |
| `connect`, `port` | `input`, `inputEnd` | `open`, `output`, `outputEnd`, `end` |
| `listen`, `port` | | `end` with `port` |
| `accept`, `port` | `input`, `inputEnd` | as `connect`, `open` when somebody has connected |
| `clear` | | `end` with `left` |

An `end` with `error` has an operation's failure, with `errno` where the system has said why.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, Final

MAX_HEADER_BYTES: Final = 4 << 20
MAX_PAYLOAD_BYTES: Final = 1 << 20
CHUNK_BYTES: Final = 64 << 10
"""Bytes that are read and sent at a time."""

VERSION: Final = 1
"""Of this protocol; both sides come from one release."""

HOST_NAME: Final = "worker.sandbox.kuberoll.io"
"""Name in the certificate that a handle shows."""

_LENGTHS: Final = struct.Struct(">II")

Header = dict[str, Any]


class InvalidFrame(ValueError):
    """Bytes that are no frame."""


def encode(header: Header, payload: bytes | memoryview = b"") -> bytes:
    """The bytes of a frame."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return b"".join((_LENGTHS.pack(len(text), len(payload)), text, payload))


class Decoder:
    """Reads frames from bytes that come in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Header, bytes]]:
        """Take bytes; yield the frames that are complete.

        Raises:
            InvalidFrame: They are none.
        """
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTHS.size:
            header, payload = _LENGTHS.unpack_from(buffer)
            if header > MAX_HEADER_BYTES or payload > MAX_PAYLOAD_BYTES:
                raise InvalidFrame(f"a frame of {header} and {payload} bytes")
            if len(buffer) < (end := _LENGTHS.size + header + payload):
                return
            text = bytes(buffer[_LENGTHS.size : _LENGTHS.size + header])
            body = bytes(buffer[_LENGTHS.size + header : end])
            del buffer[:end]
            yield _object(text), body


def _object(text: bytes) -> Header:
    try:
        found = json.loads(text.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise InvalidFrame("a header that is no JSON") from error
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise InvalidFrame("a header that is no object with a kind")
    return found
