"""What a container writes while it starts."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from typing import Any, Final

_KEPT_BYTES: Final = 4096
_PIECE_BYTES: Final = 64 << 10
_EVENT_SECONDS: Final = 3
# Type of the stream, three bytes of nothing, and a length (Docker Engine API, `POST /containers/ID/attach`).
_HEADER: Final = struct.Struct(">BxxxL")


class Output:
    """The output of a container, from before its start on."""

    def __init__(self, client: Any, container: str) -> None:
        """
        Args:
            client: The SDK's client of its engine.
            container: Its id.
        """
        self._client = client
        self._container = container
        self._began = int(time.time())
        self._file = client.attach_socket(container, params={"stdout": 1, "stderr": 1, "stream": 1})
        self._socket = getattr(self._file, "_sock", self._file)
        self._socket.setblocking(False)

    async def read(self) -> str:
        """Wait for the container's end; returns the last of what it has written."""
        loop = asyncio.get_running_loop()
        data = bytearray()
        while True:
            try:
                piece = await loop.sock_recv(self._socket, _PIECE_BYTES)
            except ConnectionError:
                break
            if not piece:
                break
            data += piece
        return text_of(bytes(data))[-_KEPT_BYTES:].strip()

    def exit_code(self) -> str:
        """How it ended, in words; blocks."""
        import docker

        try:
            wanted = {"container": self._container}
            # Only events know of a container that is gone, and Podman's somewhat later.
            until = int(time.time()) + _EVENT_SECONDS
            events = self._client.events(since=self._began, until=until, filters=wanted, decode=True)
            with contextlib.closing(events):
                for event in events:
                    code = event.get("Actor", {}).get("Attributes", {}).get("exitCode")
                    if event.get("Action") == "die" and code is not None:
                        return f"with exit code {code}"
        except (docker.errors.DockerException, OSError):
            pass
        return "for a reason that the engine does not know"

    def close(self) -> None:
        """Hear of it no more."""
        self._socket.close()
        if (response := getattr(self._file, "_response", None)) is not None:
            response.close()


def text_of(data: bytes) -> str:
    """The text of frames that an engine sends of a container without a terminal."""
    found = bytearray()
    while len(data) >= _HEADER.size:
        _, size = _HEADER.unpack_from(data)
        found += data[_HEADER.size : _HEADER.size + size]
        data = data[_HEADER.size + size :]
    return found.decode(errors="replace")
