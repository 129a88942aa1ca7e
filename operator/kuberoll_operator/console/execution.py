"""Execution of a command in a pod's container through the API server, with standard input and output.

The WebSocket protocol is Kubernetes' `v4.channel.k8s.io`, which every kubelet supports: binary messages whose first
byte is the number of a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from kuberoll_operator.console.errors import ConsoleError
from kuberoll_operator.kube.access import Access
from kuberoll_operator.kube.resources import PODS

CONNECT_SECONDS: Final = 30.0

_PROTOCOL: Final = "v4.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _STATUS = 0, 1, 2, 3
_STDERR_CHARACTERS: Final = 2000
_MESSAGE_BYTES: Final = 16 << 20


class StreamLost(Exception):
    """The connection or the command has ended; the caller knows whether everything was received.

    Attributes:
        exit_code: Exit code of the command; None if unknown.
        stderr: End of its standard error.
    """

    def __init__(self, message: str, *, exit_code: int | None = None, stderr: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.stderr = stderr


class Execution:
    """A running command."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._stderr = ""
        self._exit_code: int | None = None
        self._words = ""

    async def send(self, data: bytes) -> None:
        """Write to standard input.

        Raises:
            StreamLost: The command no longer reads it.
        """
        try:
            await self._socket.send_bytes(bytes([_STDIN]) + data)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(str(error)) from error

    async def receive(self, seconds: float) -> bytes:
        """The next bytes of standard output.

        Raises:
            StreamLost: The output has ended, or nothing arrived within `seconds`.
        """
        while True:
            try:
                message = await self._socket.receive(timeout=seconds)
            except TimeoutError as error:
                raise self._lost(f"no data for {seconds:.0f} s") from error
            except (aiohttp.ClientError, OSError) as error:
                raise self._lost(str(error)) from error
            if message.type is not aiohttp.WSMsgType.BINARY:
                raise self._lost(str(message.extra or message.data or "the connection was closed"))
            channel, data = message.data[0], message.data[1:]
            if channel == _STDOUT and data:
                return bytes(data)
            if channel == _STDERR:
                self._stderr = (self._stderr + data.decode(errors="replace"))[-_STDERR_CHARACTERS:]
            elif channel == _STATUS:
                self._ended(data)

    def _ended(self, data: bytes) -> None:
        status: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            status = json.loads(data)
        self._words = str(status.get("message") or "")
        causes = (status.get("details") or {}).get("causes") or ()
        codes = [cause.get("message") for cause in causes if cause.get("reason") == "ExitCode"]
        self._exit_code = 0 if status.get("status") == "Success" else int(codes[0]) if codes else None

    def _lost(self, words: str) -> StreamLost:
        return StreamLost(self._words or words, exit_code=self._exit_code, stderr=self._stderr.strip())


@asynccontextmanager
async def execution(
    access: Access, namespace: str, pod: str, container: str, command: Sequence[str]
) -> AsyncIterator[Execution]:
    """Run a command until the block is left.

    Raises:
        ConsoleError: The user may not execute commands in pods.
        StreamLost: It could not be started.
    """
    query = [
        ("container", container),
        *(("command", word) for word in command),
        *((stream, "true") for stream in ("stdin", "stdout", "stderr")),
    ]
    async with access.session() as session:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                socket = await session.ws_connect(
                    access.server + PODS.path(namespace, pod, "exec"),
                    params=query,
                    protocols=(_PROTOCOL,),
                    max_msg_size=_MESSAGE_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 403:
                raise ConsoleError(
                    f"missing permission: you may not get and create pods/exec in namespace {namespace}", code=2
                ) from error
            raise StreamLost(f"HTTP {error.status}: {error.message}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StreamLost(str(error) or type(error).__name__) from error
        try:
            yield Execution(socket)
        finally:
            await socket.close()
