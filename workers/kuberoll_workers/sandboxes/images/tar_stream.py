"""A plain tar that is read once, from its beginning to its end, by the standard library's reader of headers."""

from __future__ import annotations

import io
import signal
import tarfile
from collections.abc import Iterator
from typing import Final

from kuberoll_workers.sandboxes.images.errors import ImageInvalid

_MAX_HEADER: Final = 1 << 20
_HEADER_SECONDS: Final = 5.0


class TarStream:
    """A file for `tarfile`, which reads only headers from it; contents are read by `parts`."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._piece = b""
        self._at = 0
        self._position = 0
        self._ended = 0
        self.last = b""

    def tell(self) -> int:
        """Bytes that were read."""
        return self._position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Pass over what is before a position."""
        if whence != io.SEEK_SET or position < self._position:
            raise tarfile.ReadError("sizes are wrong")
        for _ in self.parts(position - self._position):
            pass
        return self._position

    def read(self, count: int) -> bytes:
        """A header."""
        if not 0 <= count <= _MAX_HEADER:
            raise tarfile.ReadError(f"a header of {count} bytes; at most {_MAX_HEADER} are read")
        begin, end = self._at, self._at + count
        if end <= len(self._piece):
            self._at = end
            self._position += count
            self.last = self._piece[begin:end]
        else:
            self.last = b"".join(self.parts(count))
            if count and not self.last:
                # `tarfile` would ask again and again for the rest of some headers.
                self._ended += 1
                if self._ended > 3:
                    raise tarfile.ReadError("it is cut off")
        return self.last

    def parts(self, count: int) -> Iterator[memoryview]:
        """The next bytes, or fewer at the end."""
        while count > 0:
            if self._at == len(self._piece):
                self._piece, self._at = next(self._pieces, b""), 0
                if not self._piece:
                    return
            part = memoryview(self._piece)[self._at : self._at + count]
            self._at += len(part)
            self._position += len(part)
            count -= len(part)
            yield part

    def drain(self) -> None:
        """Read to the end, for digests."""
        for _ in self._pieces:
            pass


def members(stream: TarStream) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Headers, with the bytes that follow each one, where the stream is then.

    Some are made to take forever (CVE-2024-6232): the kernel ends this process then, by SIGVTALRM.
    """
    try:
        _limit_time(_HEADER_SECONDS)
        archive = tarfile.TarFile(fileobj=stream, mode="r", encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
        while True:
            member = archive.next()
            _limit_time(0)
            # They would all be kept.
            archive.members.clear()  # type: ignore[attr-defined]
            if member is None:
                break
            yield member, archive.offset - member.offset_data
            # What nobody wanted is no header.
            for _ in stream.parts(archive.offset - stream.tell()):
                pass
            _limit_time(_HEADER_SECONDS)
    except (tarfile.TarError, ValueError, IndexError, KeyError, OverflowError, EOFError, RecursionError) as error:
        if isinstance(error, tarfile.ReadError) and not stream.tell():
            return
        raise ImageInvalid(f"a header at {stream.tell()} is damaged: {error}") from error
    finally:
        _limit_time(0)
    # `tarfile` takes a damaged header for the end.
    if stream.last.strip(b"\0"):
        raise ImageInvalid(f"a header at {stream.tell()} is damaged")


def _limit_time(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
