"""Supervisor of one program: starts it confined, watches its limits, ends it with all that it started.

A process of its own for each program, so that orphans come back to it: it is their "subreaper". It decides every new
process and thread. When it stops deciding, none can be created anymore, so killing what is there ends.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import fcntl
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import time
from dataclasses import asdict
from typing import Any

from kuberoll_workers.environments import process_tree
from kuberoll_workers.environments.programs import confinement, scratch
from kuberoll_workers.environments.programs.cpu_time import CpuTime
from kuberoll_workers.environments.programs.model import (
    TRUNCATED,
    ConfinementUnavailable,
    Limits,
    MachineFull,
    Outcome,
    OutcomeKind,
    ProgramFailed,
    ProgramKilled,
)
from kuberoll_workers.environments.programs.system_calls import EXIT, TASKS, THREAD, Filter

_TICK_SECONDS = 0.02
_END_SECONDS = 30.0
_SET_CHILD_SUBREAPER = 36

# struct seccomp_notif and seccomp_notif_resp, and the ioctls that pass them.
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
# Room on a disk that is as good as none.
_LITTLE = 64 << 10
# By SIGKILL, and as a shell says that its program was.
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


def supervise(client: socket.socket, filter: Filter, *, signals_are_scoped: bool) -> None:
    """Run the program that a client asks for, and answer with its outcome as JSON."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        request = json.loads(_request(client))
        answer: dict[str, Any] = asdict(_Supervision(client, request, filter, signals_are_scoped).run())
    except ConfinementUnavailable as error:
        answer = {"unavailable": str(error)}
    except ProgramKilled as error:
        answer = {"killed": str(error)}
    except MachineFull as error:
        answer = {"full": str(error)}
    except Exception as error:
        answer = {"failed": f"{type(error).__name__}: {error}"}
    client.setblocking(True)
    with contextlib.suppress(OSError):
        client.sendall(json.dumps(answer).encode())


def _kills_for_memory() -> int:
    """How often the kernel has killed a process of this machine because memory ran out; 0 where it does not say."""
    with contextlib.suppress(OSError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _room(directory: str) -> int:
    """Bytes that a directory's file system has left."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _waited() -> float:
    """CPU seconds of the processes that were waited for here."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _request(client: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        chunk = client.recv(1 << 20)
        if not chunk:
            raise ProgramFailed("the request is not whole")
        data += chunk
    return bytes(data)


class _Pipe:
    """What is kept of an output of the program."""

    def __init__(self, most: int) -> None:
        self.reading, self.writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.writing, True)
        self.kept = bytearray()
        self.full = False
        self.most = most

    def take(self) -> bool:
        """Read what is there; returns False at the end."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.reading, 1 << 16)
            self.full |= len(self.kept) + len(data) > self.most
            self.kept += data[: self.most - len(self.kept)]
            return bool(data)
        return True

    def drain(self) -> None:
        """Read what the pipe holds, but not what is written meanwhile."""
        for _ in range(16):
            before = len(self.kept)
            if self.full or not self.take() or len(self.kept) == before:
                return

    def text(self) -> str:
        return self.kept.decode("utf-8", "replace") + (TRUNCATED if self.full else "")


class _Supervision:
    def __init__(self, client: socket.socket, request: dict[str, Any], filter: Filter, scoped: bool) -> None:
        self._client = client
        self._argv: list[str] = request["argv"]
        self._stdin = memoryview(base64.b64decode(request["stdin"]))
        self._variables: dict[str, str] = request["variables"]
        self._readable = [*confinement.readable_paths(), *request["readable"]]
        self._limits = Limits(**request["limits"])
        self._scratch: str = request["scratch"]
        self._filter = filter
        self._scoped = scoped
        self._stdout, self._stderr = _Pipe(self._limits.output), _Pipe(self._limits.output)
        self._listener = -1
        self._process = 0
        # Tasks that may be there: those that were seen, and those that were allowed since.
        self._tasks = 1
        self._cpu = CpuTime(time.monotonic())
        # Processes that were closed to the last look.
        self._closed: set[int] = set()

    def run(self) -> Outcome:
        began = time.monotonic()
        self._kills = _kills_for_memory()
        self._start()
        try:
            kind = self._watch(began)
            self._cpu.look(process_tree.descendants(os.getpid()), time.monotonic())
        finally:
            status = self._end()
        wall = time.monotonic() - began
        cpu = max(self._cpu.seconds, _waited())
        for pipe in (self._stdout, self._stderr):
            pipe.drain()
        code = os.waitstatus_to_exitcode(status)
        if kind is None:
            kind = self._kind(code, cpu)
            if kind in ("ok", "error") and _room(self._scratch) < _LITTLE:
                # Whatever it has caught and printed: its files may have failed for that.
                raise MachineFull(f"the disk of {self._scratch} was full while the program ran")
        return Outcome(
            kind=kind,
            exit_code=code if kind in ("ok", "error") else None,
            stdout=self._stdout.text(),
            stderr=self._stderr.text(),
            wall_seconds=wall,
            cpu_seconds=cpu,
        )

    def _kind(self, code: int, cpu: float) -> OutcomeKind:
        """The kind of an end that the supervisor did not bring about."""
        if cpu > self._limits.cpu_seconds:
            return "cpu_time"
        if self._named_size() > self._limits.disk:
            return "disk"
        if self._stdout.full or self._stderr.full:
            return "output"
        if code == -signal.SIGXCPU:
            return "cpu_time"
        if code == -signal.SIGXFSZ:
            return "disk"
        if code in _KILLED and _kills_for_memory() > self._kills:
            # The largest of its processes.
            held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
            if held >= self._limits.memory:
                # Faster than it was looked at.
                return "memory"
            raise ProgramKilled(
                f"the machine's memory ran out, and the kernel killed the program, which held {held >> 20} MiB of the "
                f"{self._limits.memory >> 20} MiB that it may"
            )
        return "ok" if code == 0 else "error"

    # ---- the start

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        stdin, self._feed = os.pipe2(os.O_CLOEXEC)
        trouble, told = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        self._process = os.fork()
        if self._process == 0:
            self._become(parent, stdin, told, theirs)
        theirs.close()
        for descriptor in (stdin, told, self._stdout.writing, self._stderr.writing):
            os.close(descriptor)
        os.set_blocking(self._feed, False)
        with ours:
            _, listeners, _, _ = socket.recv_fds(ours, 1, 1)
        # The pipe closes when the program is executed.
        with os.fdopen(trouble, "rb") as file:
            text = file.read().decode("utf-8", "replace")
        if listeners:
            self._listener = listeners[0]
        if text or not listeners:
            self._end()
            unavailable, _, message = text.partition(":")
            kind = ConfinementUnavailable if unavailable == "ConfinementUnavailable" else ProgramFailed
            raise kind(message.strip() or text or "the program's process ended before it was confined")

    def _become(self, parent: int, stdin: int, told: int, channel: socket.socket) -> None:
        """Become the program, in the forked process; does not return."""
        try:
            os.setsid()
            confinement.end_with(parent)
            for descriptor, number in ((stdin, 0), (self._stdout.writing, 1), (self._stderr.writing, 2)):
                os.dup2(descriptor, number)
            kept = sorted((told, channel.fileno()))
            for low, high in zip((3, *(item + 1 for item in kept)), (*kept, 65536), strict=True):
                os.closerange(low, high)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                # If memory runs out, the program is killed first.
                file.write("1000")
            os.chdir(self._scratch)
            variables = confinement.variables(self._scratch, self._variables)
            confinement.enter(
                self._limits,
                self._filter,
                readable=self._readable,
                scratch=self._scratch,
                channel=channel,
                signals_are_scoped=self._scoped,
            )
            os.execve(self._argv[0], self._argv, variables)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                os.write(told, f"{type(error).__name__}: {error}".encode()[:4000])
        finally:
            # The supervisor reads it to its end before it decides that this process may exit.
            os.close(told)
            os._exit(127)

    # ---- the watch

    def _watch(self, began: float) -> OutcomeKind | None:
        """Wait for the program's end or for a limit; returns the limit that it exceeded."""
        poll = select.poll()
        ended = os.pidfd_open(self._process)
        readable = select.POLLIN | select.POLLHUP
        for descriptor in (ended, self._listener, self._stdout.reading, self._stderr.reading, self._client.fileno()):
            poll.register(descriptor, readable)
        self._client.setblocking(False)
        poll.register(self._feed, select.POLLOUT)
        pipes = {pipe.reading: pipe for pipe in (self._stdout, self._stderr)}
        self._write_stdin(poll)
        deadline = began + self._limits.wall_seconds
        next_look = began
        try:
            while True:
                now = time.monotonic()
                if now >= min(next_look, deadline):
                    if (kind := self._exceeded()) is not None:
                        return kind
                    if now >= deadline:
                        return "wall_time"
                    next_look = time.monotonic() + _TICK_SECONDS
                events = dict(poll.poll(max(1.0, 1000 * (min(next_look, deadline) - now))))
                if ended in events:
                    return None
                if self._client.fileno() in events:
                    raise ProgramFailed("the client is gone")
                if events.get(self._listener, 0) & select.POLLIN:
                    self._decide()
                for descriptor in events.keys() & pipes.keys():
                    if not pipes[descriptor].take():
                        poll.unregister(descriptor)
                    elif pipes[descriptor].full:
                        return "output"
                if self._feed in events:
                    self._write_stdin(poll)
        finally:
            os.close(ended)

    def _write_stdin(self, poll: select.poll) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while self._stdin:
                    self._stdin = self._stdin[os.write(self._feed, self._stdin) :]
            except BrokenPipeError:
                self._stdin = memoryview(b"")
            poll.unregister(self._feed)
            os.close(self._feed)
            self._feed = -1

    def _exceeded(self) -> OutcomeKind | None:
        """The limit that the program exceeds now.

        Of several, memory comes first: how long it takes to fill is the machine's doing too.
        """
        limits, processes = self._limits, list(process_tree.descendants(os.getpid()))
        self._cpu.look(processes, time.monotonic())
        # The quick measure counts memory that processes share for each of them.
        if (
            sum(map(process_tree.resident, processes)) > limits.memory
            and sum(map(process_tree.proportional, processes)) > limits.memory
        ):
            return "memory"
        if max(self._cpu.seconds, _waited()) > limits.cpu_seconds:
            return "cpu_time"
        return "disk" if self._held(processes) > limits.disk else None

    def _held(self, processes: list[int]) -> float:
        """Bytes on disk that the program holds; what cannot be seen is too much."""
        unlinked: dict[tuple[int, int], int] = {}
        mapped: set[bytes] = set()
        closed = set()
        for process in processes:
            unlinked |= process_tree.unlinked(process)
            try:
                mapped |= process_tree.mapped_unlinked(process, self._scratch)
            except PermissionError:
                # It runs a file that it may not read, by which a process closes itself to others.
                closed.add(process)
        # It may have been about to end.
        hidden, self._closed = closed & self._closed, closed
        if hidden:
            return math.inf
        # The size of a file that is only mapped is not told: at most the limit.
        unsized = mapped - {b"%02x:%02x %d" % (os.major(device), os.minor(device), inode) for device, inode in unlinked}
        return self._named_size() + sum(unlinked.values()) + len(unsized) * self._limits.file

    def _named_size(self) -> float:
        try:
            return scratch.size(self._scratch, self._limits.files)
        except scratch.Full:
            return math.inf

    # ---- what the program may start, and to whom it may send signals

    def _decide(self) -> None:
        """Answer one system call that waits for a decision."""
        buffer = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, buffer, True)
        except OSError:
            # Its task was killed meanwhile.
            return
        identity, thread, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
        name = self._filter.numbers.get(number, "")
        if name == EXIT:
            self._cpu.exiting(process_tree.group_of(thread))
            refusal = 0
        elif name in TASKS:
            refusal = 0 if self._may_create() else errno.EAGAIN
            if not refusal and not (name == "clone" and arguments[0] & THREAD):
                self._cpu.making()
        else:
            refusal = 0 if self._is_own(name, arguments) else errno.EPERM
        flags = 0 if refusal else _CONTINUE
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._listener, _SEND, _RESPONSE.pack(identity, 0, -refusal, flags))

    def _may_create(self) -> bool:
        if self._tasks >= self._limits.processes:
            # Some may have ended; those that were allowed a moment ago are not in /proc yet.
            time.sleep(0.001)
            self._tasks = process_tree.tasks(process_tree.descendants(os.getpid()))
        if self._tasks >= self._limits.processes:
            return False
        self._tasks += 1
        return True

    def _is_own(self, name: str, arguments: list[int]) -> bool:
        """True if a signal goes to a process of this program."""
        target = ctypes.c_int(arguments[0]).value
        if name == "kill" and target == 0:
            # Its own group, which is of its own session.
            return True
        if name == "tkill":
            return any(os.path.exists(f"/proc/{pid}/task/{target}") for pid in process_tree.descendants(os.getpid()))
        # A group has the number of the process that made it.
        target = -target if name == "kill" and target < -1 else target
        return target > 0 and target in process_tree.descendants(os.getpid())

    # ---- the end

    def _end(self) -> int:
        """Kill everything that is left; returns the wait status of the program."""
        if self._listener >= 0:
            # From here on no process can be created.
            os.close(self._listener)
            self._listener = -1
        status = 0
        deadline = time.monotonic() + _END_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        while True:
            try:
                pid, ended = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return status
            if pid == self._process:
                status = ended
            elif pid == 0:
                for process in process_tree.descendants(os.getpid()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                if time.monotonic() > deadline:
                    raise ProgramFailed("processes of the program cannot be killed")
                # Killed, but not dead yet.
                time.sleep(0.0005)
