"""Client of `kuberoll_workers.pods.reader`: requests, and answers that are complete or an error."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

from kuberoll_operator.console.errors import ConsoleError
from kuberoll_operator.console.execution import StreamLost

PROTOCOL: Final = 1
# The reader sends a heartbeat every ten seconds.
SILENCE_SECONDS: Final = 60.0

_LINE_BYTES: Final = 64 << 20
_DATA_BYTES: Final = 64 << 20
# The pod chooses the names of local files, so they must not lead out of the directory.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


class OutputChanged(Exception):
    """The output was rewritten while it was read; list it again."""


class RemoteFile(NamedTuple):
    """A file of the output, with its size when it was listed.

    Attributes:
        size: Size in bytes.
    """

    name: str
    size: int


class Bytes(Protocol):
    """Bidirectional byte stream: `execution.Execution`."""

    async def send(self, data: bytes) -> None: ...
    async def receive(self, seconds: float) -> bytes: ...


class Frames:
    """Frames of a byte stream: a JSON object on one line, followed by `data` bytes."""

    def __init__(self, stream: Bytes) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def next(self) -> tuple[Mapping[str, Any], bytes]:
        """The next frame that is not a heartbeat."""
        while True:
            while (end := self._buffer.find(b"\n")) < 0:
                await self._more(_LINE_BYTES)
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            try:
                message = json.loads(line)
                size = int(message.get("data", 0))
            except (ValueError, AttributeError, TypeError) as error:
                raise StreamLost(f"received data that is not an answer of a reader: {line[:80]!r}") from error
            if not 0 <= size <= _DATA_BYTES:
                raise StreamLost(f"received a frame of {size} bytes, which no reader sends")
            while len(self._buffer) < size:
                await self._more(size)
            data = bytes(self._buffer[:size])
            del self._buffer[:size]
            if "beat" not in message:
                return message, data

    async def _more(self, most: int) -> None:
        if len(self._buffer) > most:
            raise StreamLost("received data that is not an answer of a reader")
        self._buffer += await self._stream.receive(SILENCE_SECONDS)


class Reader:
    """Session with one reader.

    All methods raise `StreamLost` if the connection breaks, `OutputChanged` if the output was rewritten in the
    meantime, and `ConsoleError` if the reader reports an error.

    Attributes:
        location: Location of the run, as its pods see it.
    """

    def __init__(self, stream: Bytes) -> None:
        self._stream = stream
        self._frames = Frames(stream)
        self.location = ""

    async def greet(self) -> None:
        """Receive the reader's greeting.

        Raises:
            ConsoleError: The job's image has no reader, or one of another protocol.
        """
        try:
            hello, _ = await self._frames.next()
        except StreamLost as lost:
            if lost.exit_code:
                last = lost.stderr.splitlines()[-1] if lost.stderr else f"exit code {lost.exit_code}"
                raise ConsoleError(
                    f"the reader cannot start in the job's worker image: {last} (the image must have "
                    "kuberoll_workers.pods.reader, of this version of KubeRoll or a later one)"
                ) from lost
            raise
        if hello.get("protocol") != PROTOCOL:
            raise ConsoleError(
                f"the job's worker image has KubeRoll {hello.get('version')}, whose reader this command does not "
                "understand: install that version locally"
            )
        self.location = str(hello.get("location", ""))

    async def files(self) -> list[RemoteFile]:
        """The files as they are now; their sizes stay valid until the next call."""
        answer = await self._ask(op="list")
        found = [RemoteFile(str(item["name"]), int(item["size"])) for item in answer["files"]]
        for file in found:
            if _NAME.fullmatch(file.name) is None or file.size < 0:
                raise ConsoleError(
                    f"the output has a file that cannot be copied: {file.name!r} is not a safe file name"
                )
        return found

    async def begins_with(self, name: str, size: int, sha256: str) -> bool:
        """True if the first `size` bytes of a file have this digest."""
        answer = await self._ask(op="check", name=name, size=size, sha256=sha256)
        return answer.get("same") is True

    async def read(self, file: RemoteFile, offset: int = 0) -> AsyncIterator[bytes]:
        """The bytes of a file from an offset to its end; without an error they are complete and unaltered."""
        received = 0
        async for chunk in self._data(op="read", name=file.name, offset=offset):
            received += len(chunk)
            yield chunk
        if received != file.size - offset:
            raise StreamLost(f"{file.name}: {received} bytes received instead of {file.size - offset}")

    async def shards(self) -> list[str]:
        """Names of the shards."""
        return [str(name) for name in (await self._ask(op="shards"))["shards"]]

    async def trajectories(self, shard: str, offset: int, sha256: str) -> AsyncIterator[bytes]:
        """Trajectories of a shard as JSON lines, each once.

        Args:
            offset: Number of bytes received already.
            sha256: Their digest.
        """
        async for chunk in self._data(op="trajectories", name=shard, offset=offset, sha256=sha256):
            yield chunk

    async def _data(self, **request: Any) -> AsyncIterator[bytes]:
        await self._send(request)
        digest, received = hashlib.sha256(), 0
        while True:
            message, data = await self._frames.next()
            if message.get("end"):
                break
            _raise_for(message)
            digest.update(data)
            received += len(data)
            yield data
        if message.get("size") != received or message.get("sha256") != digest.hexdigest():
            raise StreamLost(f"{request['name']}: the data was corrupted on the way")

    async def _ask(self, **request: Any) -> Mapping[str, Any]:
        await self._send(request)
        message, _ = await self._frames.next()
        _raise_for(message)
        return message

    async def _send(self, request: Mapping[str, Any]) -> None:
        await self._stream.send(json.dumps(request).encode() + b"\n")


def _raise_for(message: Mapping[str, Any]) -> None:
    if "error" in message:
        if message.get("changed"):
            raise OutputChanged(str(message["error"]))
        raise ConsoleError(f"the output cannot be read: {message['error']}")
