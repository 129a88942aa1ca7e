"""Layers as they are stored, read as plain tar: gzip, Zstandard or neither, told by their first bytes.

What is read is hashed on the way, before and after decompression, in a thread: hashing, decompression and the writing
of files each take a processor's time.
"""

from __future__ import annotations

import hashlib
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from kuberoll_workers.sandboxes.images.errors import DigestMismatch, ImageInvalid

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPABLE: Final = tuple(bytes([0x50 + i, 0x2A, 0x4D, 0x18]) for i in range(16))
_OTHERS: Final = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}
_READ: Final = 1 << 20
_PIECE: Final = 1 << 20
_WAITING: Final = 8

Pull = Callable[[int], bytes]


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...
    def rest(self) -> bytes | None:
        """What `decompress` has not taken yet; None: it wants more."""


class _Gzip:
    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inner.decompress(data, max_length)

    def rest(self) -> bytes | None:
        return self._inner.unconsumed_tail or None


class _Zstd:
    def __init__(self) -> None:
        self._inner = zstd.ZstdDecompressor()

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inner.decompress(data, max_length)

    def rest(self) -> bytes | None:
        return None if self._inner.needs_input else b""


def pieces(pull: Pull) -> Iterator[bytes]:
    """A layer as plain tar, in pieces of at most a mebibyte.

    Args:
        pull: Reads at most as many bytes; none: that was all.

    Raises:
        ImageInvalid: It is compressed by something else, damaged or cut off.
    """
    data = pull(_READ)
    for magic, name in _OTHERS.items():
        if data.startswith(magic):
            raise ImageInvalid(f"a layer is compressed by {name}: gzip and zstd are read, which every registry takes")
    make: type[_Gzip | _Zstd]
    if data.startswith(_GZIP):
        make = _Gzip
    elif data.startswith((_ZSTD, *_SKIPPABLE)):
        make = _Zstd
    else:
        while data:
            yield data
            data = pull(_READ)
        return
    try:
        yield from _decompressed(make, data, pull)
    except (zlib.error, zstd.ZstdError, EOFError) as error:
        raise ImageInvalid(f"a layer is damaged: {error}") from error


def _decompressed(make: type[_Gzip | _Zstd], data: bytes, pull: Pull) -> Iterator[bytes]:
    while True:
        one: _Decompressor = make()
        while not one.eof:
            # Kept in bounds, however much the compressed bytes stand for.
            if made := one.decompress(data, _PIECE):
                yield made
            rest = b"" if one.eof else one.rest()
            if rest is None and not (rest := pull(_READ)):
                raise EOFError("it is cut off")
            data = rest
        # Members follow each other; some writers pad with zeros.
        data = (one.unused_data or pull(_READ)).lstrip(b"\0")
        while not data:
            if not (data := pull(_READ)):
                return
            data = data.lstrip(b"\0")


class Reader:
    """Reads a layer in a thread of its own, and what digests it has."""

    def __init__(self, pull: Pull, *, diff_id: str, digest: str | None = None) -> None:
        """
        Args:
            diff_id: Digest of the plain tar.
            digest: Digest of what is stored; None: it was checked before.
        """
        self._pull = pull
        self._expected = {"stored": digest, "unpacked": diff_id}
        self._hashes = {
            side: hashlib.new(text.partition(":")[0]) for side, text in self._expected.items() if text is not None
        }
        self._made: queue.Queue[bytes | BaseException | None] = queue.Queue(_WAITING)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="layer", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[bytes]:
        while (item := self._made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def check(self) -> None:
        """Compare the digests, when all is read.

        Raises:
            DigestMismatch: One is another.
        """
        for side, hashed in self._hashes.items():
            wanted = self._expected[side]
            if (found := f"{hashed.name}:{hashed.hexdigest()}") != wanted:
                raise DigestMismatch(f"the {side} layer has the digest {found}, and its image says {wanted}")

    def close(self) -> None:
        """Stop reading."""
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._made.get(timeout=0.05)
            except queue.Empty:
                continue

    def _run(self) -> None:
        try:
            for piece in pieces(self._stored):
                if self._stopped.is_set():
                    return
                self._hashes["unpacked"].update(piece)
                self._made.put(piece)
        except BaseException as error:
            self._made.put(error)
        else:
            self._made.put(None)

    def _stored(self, count: int) -> bytes:
        data = self._pull(count)
        if (hashed := self._hashes.get("stored")) is not None:
            hashed.update(data)
        return data
