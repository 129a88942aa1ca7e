"""A server of an environment as a child process of the worker, over the same protocol as elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kuberoll_workers.environments import messages, process_access
from kuberoll_workers.environments.remote.addresses import Address

REFUSED = b"refused "
"""Beginning of the line of a server whose environment cannot be created; a fault follows."""

_START_SECONDS = 330.0
_MOST_BYTES = 1 << 20
_END_SECONDS = 20.0
_SOCKET = "server.sock"
_LONGEST_PATH = 107
"""Of a Unix socket."""

_log = logging.getLogger(__name__)


class ChildServer:
    """Starts a server when its address is asked for, and again when it is gone.

    It listens at a Unix socket in a directory of its own, has the clean variables of an environment's process and
    none of the worker's descriptors, and ends with the worker.
    """

    def __init__(self, settings: Mapping[str, Any], files: process_access.ProcessAccess) -> None:
        """
        Args:
            settings: Fields of `serving.Serving`, without token and address.
            files: Files and variables that the server's processes may use.
        """
        self.token = secrets.token_hex(16)
        self._settings = dict(settings)
        self._files = files
        self._keeper: subprocess.Popen[bytes] | None = None
        self._control = -1
        self._channel: socket.socket | None = None
        self._scratch = ""

    @property
    def pid(self) -> int | None:
        """Process id of the keeper that the server runs under; None: it does not run."""
        return None if self._keeper is None else self._keeper.pid

    async def addresses(self) -> Sequence[Address]:
        """The server's address, when it answers.

        Raises:
            EnvironmentFault: The environment cannot be created.
        """
        if self._keeper is not None and self._keeper.poll() is not None:
            _log.warning("the environment's server ended with exit code %s; starting it again", self._keeper.returncode)
            await asyncio.to_thread(self._end)
        if self._keeper is None:
            await self._start()
        return [Address("http://localhost", None, f"{self._scratch}/{_SOCKET}")] if self._keeper else []

    async def close(self) -> None:
        if self._keeper is not None:
            await asyncio.to_thread(self._end)

    async def _start(self) -> None:
        process_access.hide_from_others()
        self._scratch = _directory()
        self._channel, theirs = socket.socketpair()
        watched, self._control = os.pipe()
        try:
            self._keeper = await asyncio.to_thread(self._spawn, theirs.fileno(), watched)
        except OSError as error:
            _log.warning("the environment's server could not be started: %s", error)
            self._end()
            return
        finally:
            theirs.close()
            os.close(watched)
        settings = {**self._settings, "token": self.token, "path": f"{self._scratch}/{_SOCKET}"}
        loop = asyncio.get_running_loop()
        self._channel.setblocking(False)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await loop.sock_sendall(self._channel, msgspec.json.encode(settings) + b"\n")
                answer = await self._line()
        except (TimeoutError, OSError):
            answer = b""
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._end))
            raise
        if not answer.endswith(b"\n") or answer.startswith(REFUSED):
            await asyncio.to_thread(self._end)
        if answer.startswith(REFUSED):
            raise messages.decode_fault(answer.removeprefix(REFUSED))

    async def _line(self) -> bytes:
        """The server's line; less if it ended before."""
        assert self._channel is not None
        line = bytearray()
        while not line.endswith(b"\n") and len(line) < _MOST_BYTES:
            data = await asyncio.get_running_loop().sock_recv(self._channel, 1 << 16)
            if not data:
                break
            line += data
        return bytes(line)

    def _spawn(self, channel: int, watched: int) -> subprocess.Popen[bytes]:
        # Its own session: only the worker reacts to a Ctrl-C at the terminal.
        return subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "kuberoll_workers.environments.keeper"),
                *(str(channel), str(watched), self._scratch, "server"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=process_access.variables(os.environ, self._files, scratch=self._scratch),
            pass_fds=(channel, watched),
            start_new_session=True,
        )

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._control >= 0:
            os.close(self._control)
            self._control = -1
        if self._keeper is not None:
            try:
                self._keeper.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
            self._keeper = None
        with contextlib.suppress(OSError):
            shutil.rmtree(self._scratch)


def _directory() -> str:
    """A new directory of this user alone; where the path of a socket in it would be too long, below /tmp."""
    made = tempfile.mkdtemp(prefix="kuberoll-environment-")
    if len(os.fsencode(f"{made}/{_SOCKET}")) <= _LONGEST_PATH:
        return made
    Path(made).rmdir()
    return tempfile.mkdtemp(prefix="kuberoll-environment-", dir="/tmp")
