"""The socket between a worker and an environment's process: one answer to each call, from the process that was asked.

A frame is a header and a body. The header has the body's size, its CRC-32, and the id of the call: 16 random bytes that
the answer repeats. The environment's code runs in the process that answers, and forks copies of it, so that neither the
descriptor nor an id is a proof: the worker accepts a frame only if the kernel says that the process that was asked has
written every byte of it, if it names the one call that waits, if its body is whole, and if nothing follows it. Anything
else is a violation, after which nothing that comes from the channel is believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Final

from kuberoll_workers.data.tracebacks import Traceback
from kuberoll_workers.environments.messages import MAX_BYTES, InvalidMessage

HELLO: Final = bytes(16)
"""Id of the frame with which a process introduces itself, before any of the environment's code runs in it."""

_HEADER: Final = struct.Struct(">II16s")
_CREDENTIALS: Final = struct.Struct("=3i")
_CHUNK: Final = 1 << 16
_LARGE_CHUNK: Final = 1 << 20
# A message, and the method that it calls or a mark of what it is.
_LARGEST_BODY: Final = MAX_BYTES + (1 << 10)


def frame(call: bytes, body: bytes) -> bytes:
    """A frame; its body comes from `messages`, which bounds it."""
    return _HEADER.pack(len(body), zlib.crc32(body), call) + body


class Inbox:
    """What has arrived for the call that waits; decides what is its answer. Does no I/O.

    Attributes:
        process: Id of the process that was the first to write, and is asked.
    """

    __slots__ = ("_call", "_data", "_size", "process")

    def __init__(self) -> None:
        self.process: int | None = None
        self._call: bytes | None = None
        self._data = bytearray()
        self._size = _HEADER.size

    def expect(self, call: bytes) -> None:
        """Begin to wait for the answer to a call."""
        self._call = call

    @property
    def missing(self) -> int:
        """Number of bytes that are known to be missing."""
        return self._size - len(self._data)

    def take(self, data: bytes, process: int | None) -> bytes | None:
        """Take what one process has written; returns the body of the answer when it is whole.

        Args:
            process: Its process id, as the kernel says; None where the kernel does not say it.

        Raises:
            InvalidMessage: It is not the answer that is waited for.
        """
        if self.process is None:
            self.process = process
        if process != self.process:
            raise InvalidMessage(f"process {process} has written to its channel, and process {self.process} was asked")
        if self._call is None:
            raise InvalidMessage("it has sent what nobody asked for")
        self._data += data
        if len(self._data) < _HEADER.size:
            return None
        size, checksum, call = _HEADER.unpack_from(self._data)
        if call != self._call:
            raise InvalidMessage("it has sent what is not the answer to its call")
        if size > _LARGEST_BODY:
            raise InvalidMessage(f"it announced a message of {size} bytes")
        self._size = _HEADER.size + size
        if self.missing > 0:
            return None
        if self.missing < 0:
            raise InvalidMessage("it has sent more than one answer")
        body = bytes(memoryview(self._data)[_HEADER.size :])
        if zlib.crc32(body) != checksum:
            raise InvalidMessage("its answer is damaged")
        self._data, self._size, self._call = bytearray(), _HEADER.size, None
        return body


class Caller:
    """The worker's end. Makes one call at a time, with an event loop or without one."""

    def __init__(self, end: socket.socket, *, on_fault: Callable[[], None] | None = None) -> None:
        """`on_fault` is called when, between calls, the process ends or has sent what nobody asked for."""
        self._socket = end
        self._inbox = Inbox()
        self._introduced = False
        self._on_fault = on_fault
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: asyncio.Future[bytes] | None = None
        self._fault: Exception | None = None
        self._pidfd: int | None = None
        # Where the kernel does not say who has written (other systems than Linux), ids and sums are all there is.
        self._known = sys.platform == "linux"
        if self._known:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    async def ask(self, body: bytes) -> bytes:
        """Make a call and wait for its answer.

        Raises:
            EOFError, OSError: The process is gone.
            InvalidMessage: It sent something else.
        """
        call = os.urandom(16)
        data = frame(call, body)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._socket.setblocking(False)
            self._loop.add_reader(self._socket.fileno(), self._readable)
            await self._answer(HELLO, b"")
            # It has just spoken, so this number is not another process's.
            if (process := self._inbox.process) is not None:
                with contextlib.suppress(OSError):
                    self._pidfd = os.pidfd_open(process)
        return await self._answer(call, data)

    def ask_now(self, body: bytes, *, seconds: float) -> bytes:
        """`ask` without an event loop.

        Raises:
            TimeoutError: Nothing came for this time.
        """
        self._socket.settimeout(seconds)
        if not self._introduced:
            self._introduced = True
            self._answer_now(HELLO)
        call = os.urandom(16)
        self._socket.sendall(frame(call, body))
        return self._answer_now(call)

    @property
    def sound(self) -> bool:
        """True if the process is there, as far as is known, and has sent nothing but answers."""
        return self._fault is None

    def signal(self, number: int) -> bool:
        """Send a signal to the process; False if that cannot be done."""
        if self._pidfd is None:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the channel; a call that waits ends with EOFError."""
        self._on_fault = None
        if self._fault is None:
            self._fail(EOFError())
        self._socket.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    async def _answer(self, call: bytes, data: bytes) -> bytes:
        if self._fault is not None:
            raise self._fault
        assert self._loop is not None
        self._inbox.expect(call)
        waiting: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting = waiting
        try:
            try:
                sent = self._socket.send(data) if data else 0
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                await self._loop.sock_sendall(self._socket, memoryview(data)[sent:])
            return await waiting
        finally:
            self._waiting = None
            if waiting.done() and not waiting.cancelled():
                # Retrieved, also where the sending has failed before.
                waiting.exception()

    def _answer_now(self, call: bytes) -> bytes:
        self._inbox.expect(call)
        while True:
            data, process = self._received()
            if (body := self._inbox.take(data, process)) is not None:
                return body

    def _readable(self) -> None:
        try:
            data, process = self._received()
            body = self._inbox.take(data, process)
        except (BlockingIOError, InterruptedError):
            return
        except (EOFError, OSError, InvalidMessage) as error:
            self._fail(error)
            return
        if body is not None and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(body)

    def _received(self) -> tuple[bytes, int | None]:
        """Some bytes, all of one writer, and its process id.

        Raises:
            EOFError, OSError: The process is gone.
        """
        size = _CHUNK if self._inbox.missing <= _CHUNK else _LARGE_CHUNK
        if not self._known:
            data = self._socket.recv(size)
            process = None
        else:
            # There is room for credentials only: descriptors that somebody sends along are not taken.
            data, ancillary, _, _ = self._socket.recvmsg(size, socket.CMSG_SPACE(_CREDENTIALS.size))
            process = next(
                (
                    _CREDENTIALS.unpack(found)[0]
                    for level, kind, found in ancillary
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
                ),
                None,
            )
        if not data:
            raise EOFError
        return data, process

    def _fail(self, error: Exception) -> None:
        self._fault = error
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        if self._waiting is None:
            if self._on_fault is not None:
                self._on_fault()
        elif not self._waiting.done():
            self._waiting.set_exception(error)


def is_waiting(stack: Traceback) -> bool:
    """True if a process with this stack waits for its next call."""
    return f'File "{__file__}"' in stack.text and ", in receive\n" in stack.text


class Answerer:
    """The end of the process that is asked.

    Copies of the process have no part in it: Python closes the channel in those that it forks, and one that comes back
    from the environment's code to answer ends instead.
    """

    def __init__(self, end: socket.socket) -> None:
        """Take the end over, and introduce this process; nothing else may have forked it since."""
        self._socket = end
        self._process = os.getpid()
        # Bound to names that the environment cannot replace.
        self._own, self._exit = os.getpid, os._exit
        end.set_inheritable(False)
        os.register_at_fork(after_in_child=end.close)
        self._socket.sendall(frame(HELLO, b""))

    def receive(self) -> tuple[bytes, bytes]:
        """The next call: its id and its body. Ends the process when the worker has closed the channel."""
        size, checksum, call = _HEADER.unpack(self._exactly(_HEADER.size))
        body = self._exactly(size)
        if zlib.crc32(body) != checksum:
            # Somebody else has read a part of it.
            self._exit(70)
        return call, body

    def answer(self, call: bytes, body: bytes) -> None:
        """Answer a call; a copy of the process that was asked ends instead.

        Raises:
            OSError: The worker is gone, or the environment has closed the channel.
        """
        if self._own() != self._process:
            self._exit(0)
        self._socket.sendall(frame(call, body))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self._socket.recv(min(size - len(data), _LARGE_CHUNK))
            if not chunk:
                self._exit(0)
            data += chunk
        return bytes(data)
