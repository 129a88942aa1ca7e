"""A reader pod: it serves the files of a run to clients that may run a command in it.

    python -m kuberoll_workers.pods.reader --config FILE           # the pod: runs until it is idle
    python -m kuberoll_workers.pods.reader --config FILE --serve   # a command in it: responds on standard output

FILE is a `contract.PodConfig`. `kuberoll get` is the client. A `Request` is a line of JSON; `FrameWriter` writes the
responses. Every response has the number of bytes that follow and ends with their SHA-256, so that a cut connection is
never taken for the end. `{"beat": true}` comes every ten seconds, between frames; `{"error": …, "changed": …}` answers
a request that cannot be fulfilled: if `changed` is true, the file is no longer what was listed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from kuberoll_workers.output.copies import CHUNK_BYTES, Copies, CopyBroken, RunFile
from kuberoll_workers.pods.files import read_config

PROTOCOL: Final = 1
IDLE_SECONDS: Final = 120.0
BEAT_SECONDS: Final = 10.0

_MARK: Final = "kuberoll-reader"


class Request(msgspec.Struct, kw_only=True):
    """A request, one line on standard input.

    Attributes:
        op: `list` the files; `check` whether the first `size` bytes of one have this `sha256`; `read` one from `offset`
            on; `shards`: name the shards; `trajectories` of shard `name`, as JSON lines, from byte `offset` on, where
            the bytes before it still have this `sha256`.
    """

    op: str
    name: str = ""
    offset: int = 0
    size: int = 0
    sha256: str = ""


class RequestRefused(Exception):
    """A request is invalid; the message has the reason."""


class FrameWriter:
    """Writer of responses as frames: a JSON object in one line, followed by `data` bytes if it has that field."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        # The heartbeat comes from another thread and must not interrupt a frame.
        self._lock = threading.Lock()

    def write(self, message: dict[str, Any], data: bytes = b"") -> None:
        """Write one frame."""
        with self._lock:
            self._out.write(msgspec.json.encode(message) + b"\n" + data)
            self._out.flush()

    def write_stream(self, chunks: Iterable[bytes]) -> None:
        """Write the chunks as frames, then one with the SHA-256 of all their bytes."""
        digest, size = hashlib.sha256(), 0
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            self.write({"data": len(chunk)}, chunk)
        self.write({"end": True, "size": size, "sha256": digest.hexdigest()})


class Reader:
    """Handler of the requests of one connection.

    Args:
        location: Directory or URI of the run.
    """

    def __init__(self, location: str, answers: FrameWriter) -> None:
        self._frames = answers
        self._copies = Copies(location)
        self._files: dict[str, RunFile] = {}

    def answer(self, line: bytes) -> None:
        """Respond to one request; errors are responses, too."""
        try:
            self._answer(msgspec.json.decode(line, type=Request))
        except CopyBroken as error:
            self._frames.write({"error": str(error), "changed": True})
        except Exception as error:
            # Every object store's library raises its own exceptions: no such bucket, no credentials, no network.
            words = str(error) if isinstance(error, RequestRefused | ValueError) else f"{type(error).__name__}: {error}"
            self._frames.write({"error": words, "changed": False})

    def _answer(self, request: Request) -> None:
        match request.op:
            case "list":
                self._files = {file.name: file for file in self._copies.files()}
                files = [{"name": file.name, "size": file.size} for file in self._files.values()]
                self._frames.write({"files": files})
            case "check":
                file = self._file(request.name)
                same = request.size <= file.size and self._copies.digest(file, request.size) == request.sha256
                self._frames.write({"same": same})
            case "read":
                self._frames.write_stream(self._copies.read(self._file(request.name), request.offset))
            case "shards":
                self._frames.write({"shards": self._copies.shards()})
            case "trajectories":
                self._frames.write_stream(self._trajectories(request))
            case _:
                raise RequestRefused(f"unknown request {request.op!r}")

    def _file(self, name: str) -> RunFile:
        try:
            return self._files[name]
        except KeyError:
            raise RequestRefused(f"no file {name!r} was listed") from None

    def _trajectories(self, request: Request) -> Iterator[bytes]:
        """Stream the trajectories from byte `offset` on, which the client has already."""
        chunks = _pieces(self._copies.trajectories(request.name))
        before, left = hashlib.sha256(), request.offset
        for chunk in chunks:
            before.update(chunk[:left])
            rest, left = chunk[left:], max(0, left - len(chunk))
            if left == 0:
                break
        else:
            rest = b""
        if left or (request.offset and before.hexdigest() != request.sha256):
            raise CopyBroken(f"{request.name} is stored in another order than when it was first read")
        if rest:
            yield rest
        yield from chunks


def _pieces(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Join lines into pieces of `CHUNK_BYTES`, so that small lines do not get a frame each."""
    held = bytearray()
    for line in lines:
        held += line
        while len(held) >= CHUNK_BYTES:
            yield bytes(held[:CHUNK_BYTES])
            del held[:CHUNK_BYTES]
    if held:
        yield bytes(held)


def serve(location: str, requests: Iterable[bytes], out: BinaryIO, *, beat_seconds: float = BEAT_SECONDS) -> None:
    """Respond to requests until the input ends.

    Heartbeats are sent meanwhile: computing a digest takes long, and proxies close silent connections.
    """
    answers = FrameWriter(out)
    over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError, ValueError):
            while not over.wait(beat_seconds):
                _touch()
                answers.write({"beat": True})

    _touch()
    beating = threading.Thread(target=beat, name="beat", daemon=True)
    beating.start()
    try:
        hello = {"protocol": PROTOCOL, "version": importlib.metadata.version("kuberoll"), "location": location}
        answers.write(hello)
        reader = Reader(location, answers)
        for line in requests:
            if line.strip():
                reader.answer(line)
    finally:
        over.set()


def wait_until_idle(*, idle_seconds: float = IDLE_SECONDS, look_seconds: float = 5.0) -> None:
    """Wait until there was no reader for `idle_seconds`; readers touch the marker file."""
    _touch()
    while time.time() - _mark().stat().st_mtime < idle_seconds:
        time.sleep(look_seconds)


def _mark() -> Path:
    return Path(tempfile.gettempdir()) / _MARK


def _touch() -> None:
    _mark().touch()


def _private_output() -> BinaryIO:
    """Reserve standard output for frames: from now on, prints of libraries go to standard error."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out


def main() -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(prog="kuberoll_workers.pods.reader", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a PodConfig")
    parser.add_argument("--serve", action="store_true", help="answer requests on standard input")
    arguments = parser.parse_args()
    # The first process of a container has no default action for it.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if arguments.serve:
        out = _private_output()
        # The client may have disconnected.
        with contextlib.suppress(BrokenPipeError):
            serve(read_config(arguments.config).output, sys.stdin.buffer, out)
        # A normal exit could block on a pipe that is no longer read.
        os._exit(0)
    wait_until_idle()


if __name__ == "__main__":
    main()
