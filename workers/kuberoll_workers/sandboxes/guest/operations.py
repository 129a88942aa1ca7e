"""Operations of a connection: commands, functions on files, and connections within the sandbox."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from . import keepers
from .frames import CHUNK_BYTES, Header

# A pipe holds 1 MiB at most.
_MOST_DRAINED: Final = (1 << 20) // CHUNK_BYTES + 1


class Watcher(Protocol):
    """The server's loop, as operations use it."""

    def read(self, descriptor: int, ready: Callable[[], object]) -> None:
        """Call a function whenever something can be read from a descriptor."""
        ...

    def write(self, descriptor: int, ready: Callable[[], object]) -> None:
        """Call a function whenever something can be written to a descriptor."""
        ...

    def forget(self, descriptor: int) -> None:
        """Watch a descriptor no more."""
        ...

    def discard(self, descriptor: int) -> None:
        """Read a descriptor to its end for nobody, and close it."""
        ...

    def take_back(self, keeper: keepers.Keeper, *, free: bool) -> None:
        """Take back a keeper that has done its task; if it is not free, it is gone."""
        ...


Send = Callable[[Header, bytes], None]


class Outputs:
    """What is sent of a stream: its beginning at once, and, if it is longer than it may be, its end at the last."""

    def __init__(self, stream: str, limit: int | None, send: Send) -> None:
        """`limit` is the number of bytes that are sent at most; None: all are."""
        self._stream = stream
        self._send = send
        self._head = None if limit is None else limit // 2
        self._room = 0 if limit is None else limit - limit // 2
        self._tail: deque[bytes] = deque()
        self._held = 0
        self._skipped = 0

    def take(self, data: bytes) -> None:
        """Take bytes of the stream."""
        if self._head is None:
            self._pass(data)
            return
        first, rest = data[: self._head], data[self._head :]
        self._head -= len(first)
        if first:
            self._pass(first)
        if rest:
            self._tail.append(rest)
            self._held += len(rest)
            self._shorten()

    def end(self) -> None:
        """Send what was kept of the stream's end, and how many bytes are missing before it."""
        if self._skipped:
            self._send({"kind": "output", "stream": self._stream, "skipped": self._skipped}, b"")
        for data in self._tail:
            self._pass(data)
        self._tail.clear()

    def _shorten(self) -> None:
        while self._held > self._room:
            first = self._tail.popleft()
            surplus = min(len(first), self._held - self._room)
            self._skipped += surplus
            self._held -= surplus
            if surplus < len(first):
                self._tail.appendleft(first[surplus:])

    def _pass(self, data: bytes) -> None:
        for start in range(0, len(data), CHUNK_BYTES):
            self._send({"kind": "output", "stream": self._stream}, data[start : start + CHUNK_BYTES])


class Operation:
    """An operation that goes on: it is given what comes for it, and ends by itself or is killed.

    Attributes:
        deadline: When it is killed; None: never.
        late: True if that was so.
    """

    deadline: float | None = None
    late = False

    def input(self, data: bytes) -> None:
        """Take bytes for its input."""

    def end_input(self) -> None:
        """Take the end of its input."""

    def kill(self) -> None:
        """End it early."""

    def pause(self) -> None:
        """Read nothing more for now: the handle does not take what there is."""

    def resume(self) -> None:
        """Read on."""

    def abandon(self) -> None:
        """Go on without a handle: it is gone."""
        self.kill()


class _Input:
    """The writing end of a pipe or socket, with what could not be written yet.

    Attributes:
        closed: True if nothing can be written any more.
    """

    def __init__(self, descriptor: int, loop: Watcher, taken: Callable[[int], None]) -> None:
        self.descriptor = descriptor
        self._loop = loop
        self._taken = taken
        self._waiting = bytearray()
        self._ended = self._watched = self.closed = False

    def take(self, data: bytes) -> None:
        if self.closed:
            self._taken(len(data))
            return
        self._waiting += data
        self._flush()

    def end(self) -> None:
        self._ended = True
        self._flush()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._stop()
            self.shut()

    def shut(self) -> None:
        os.close(self.descriptor)

    def _flush(self) -> None:
        if self.closed:
            return
        try:
            while self._waiting:
                written = os.write(self.descriptor, self._waiting[:CHUNK_BYTES])
                del self._waiting[:written]
                self._taken(written)
        except BlockingIOError:
            if not self._watched:
                self._watched = True
                self._loop.write(self.descriptor, self._flush)
            return
        except OSError:
            # Nobody reads it any more: what comes is dropped.
            self._taken(len(self._waiting))
            self._waiting.clear()
            self.close()
            return
        self._stop()
        if self._ended:
            self.close()

    def _stop(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.forget(self.descriptor)


class TaskOperation(Operation):
    """An operation that is a process."""

    def __init__(self, task: keepers.Task, loop: Watcher, send: Send, *, limit: int | None) -> None:
        """`limit` is the number of bytes that are sent of each stream at most; None: all are."""
        self._task = task
        self._loop = loop
        self._send = send
        self._outputs = {at: Outputs(stream, limit, send) for at, stream in task.outputs.items()}
        self._open = set(task.outputs)
        self._input = _Input(task.input, loop, lambda count: send({"kind": "taken", "bytes": count}, b""))
        self._over = False
        loop.read(task.keeper.control.fileno(), self._hear)
        self.resume()

    def input(self, data: bytes) -> None:
        self._input.take(data)

    def end_input(self) -> None:
        self._input.end()

    def kill(self) -> None:
        self._task.keeper.kill(is_function=self._task.is_function)

    def pause(self) -> None:
        for descriptor in self._open:
            self._loop.forget(descriptor)

    def resume(self) -> None:
        if not self._over:
            for descriptor in self._open:
                self._loop.read(descriptor, functools.partial(self._read, descriptor))

    def _read(self, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._outputs[descriptor].take(data)
            return True
        self._open.discard(descriptor)
        self._loop.forget(descriptor)
        os.close(descriptor)
        return False

    def _hear(self) -> None:
        try:
            answer = self._task.keeper.answer()
        except BlockingIOError:
            return
        # What it has written is in the pipes; what others write later is for nobody.
        self._over = True
        self._loop.forget(self._task.keeper.control.fileno())
        self._loop.take_back(self._task.keeper, free=answer.pop("free", False))
        self._input.close()
        for descriptor in list(self._open):
            for _ in range(_MOST_DRAINED):
                if not self._read(descriptor):
                    break
            if descriptor in self._open:
                self._loop.discard(descriptor)
        self._open.clear()
        for output in self._outputs.values():
            output.end()
        self._send({"kind": "end", **answer, **({"late": True} if self.late else {})}, b"")


class RelayOperation(Operation):
    """An operation that is a connection within the sandbox; each of its directions ends by itself."""

    def __init__(self, end: socket.socket, loop: Watcher, send: Send) -> None:
        self._socket = end
        self._loop = loop
        self._send = send
        self._input = _Half(end, loop, lambda count: send({"kind": "taken", "bytes": count}, b""), self._check)
        # Whether it is watched, and whether anything more can come from it.
        self._reading, self._open = False, True
        end.setblocking(False)
        send({"kind": "open"}, b"")
        self.resume()

    def input(self, data: bytes) -> None:
        self._input.take(data)

    def end_input(self) -> None:
        self._input.end()

    def kill(self) -> None:
        self._end()

    def pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.forget(self._input.reader)

    def resume(self) -> None:
        if not self._reading and self._open and self._socket.fileno() >= 0:
            self._reading = True
            self._loop.read(self._input.reader, self._read)

    def _read(self) -> None:
        try:
            data = self._socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._end()
            return
        if data:
            self._send({"kind": "output", "stream": "stdout"}, data)
            return
        self.pause()
        self._open = False
        self._send({"kind": "outputEnd"}, b"")
        self._check()

    def _check(self) -> None:
        if not self._open and self._input.closed:
            self._end()

    def _end(self) -> None:
        if self._socket.fileno() < 0:
            return
        self.pause()
        # Not yet closed in both directions for `_check`, which closing the input calls.
        self._open = True
        self._input.close()
        self._open = False
        os.close(self._input.reader)
        self._socket.close()
        self._send({"kind": "end"}, b"")


class _Half(_Input):
    """The writing half of a socket; a descriptor can be watched only once, so each half has its own.

    Attributes:
        reader: Descriptor of the reading half.
    """

    def __init__(
        self, end: socket.socket, loop: Watcher, taken: Callable[[int], None], closed: Callable[[], None]
    ) -> None:
        """`closed` is called when it is closed."""
        self._end = end
        self._when_closed = closed
        self.reader = os.dup(end.fileno())
        super().__init__(end.fileno(), loop, taken)

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)
        self._when_closed()


class AcceptOperation(Operation):
    """An operation that waits for a connection to a port of the sandbox, and then is that connection."""

    def __init__(self, listener: Listener, loop: Watcher, send: Send) -> None:
        self._listener = listener
        self._loop = loop
        self._send = send
        self._relay: RelayOperation | None = None
        listener.wait(self)

    def connected(self, end: socket.socket) -> None:
        """Become a connection."""
        self._relay = RelayOperation(end, self._loop, self._send)

    def input(self, data: bytes) -> None:
        if self._relay is not None:
            self._relay.input(data)

    def end_input(self) -> None:
        if self._relay is not None:
            self._relay.end_input()

    def kill(self) -> None:
        if self._relay is not None:
            self._relay.kill()
        else:
            self._listener.leave(self)
            self._send({"kind": "end"}, b"")

    def pause(self) -> None:
        if self._relay is not None:
            self._relay.pause()

    def resume(self) -> None:
        if self._relay is not None:
            self._relay.resume()


class Listener:
    """A port of the sandbox, whose connections go to those who wait for them.

    Attributes:
        port: Its number.
    """

    def __init__(self, port: int, loop: Watcher) -> None:
        """
        Raises:
            OSError: The port is taken.
        """
        self._socket = socket.create_server(("127.0.0.1", port), backlog=128)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._loop = loop
        self._waiting: deque[AcceptOperation] = deque()
        self._watched = False

    def wait(self, operation: AcceptOperation) -> None:
        """Give the next connection to an operation."""
        self._waiting.append(operation)
        if not self._watched:
            self._watched = True
            self._loop.read(self._socket.fileno(), self._accept)

    def leave(self, operation: AcceptOperation) -> None:
        """Give it none."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(operation)

    def _accept(self) -> None:
        if not self._waiting:
            # Connections wait in the system's queue until somebody takes them.
            self._watched = False
            self._loop.forget(self._socket.fileno())
            return
        with contextlib.suppress(OSError):
            end, _ = self._socket.accept()
            self._waiting.popleft().connected(end)


def connect(port: int) -> socket.socket:
    """Connect to a port of the sandbox itself.

    Raises:
        OSError: Nobody listens there.
    """
    refusal: OSError | None = None
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        end = socket.socket(family, socket.SOCK_STREAM)
        # Within one machine either somebody listens or nobody does; a full queue is not waited for.
        end.settimeout(1.0)
        try:
            end.connect((host, port))
        except OSError as error:
            end.close()
            refusal = refusal or error
        else:
            return end
    assert refusal is not None
    raise refusal
