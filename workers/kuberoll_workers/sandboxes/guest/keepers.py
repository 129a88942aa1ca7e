"""Keepers: processes that do one operation after another, a command or a function on files.

A keeper is the parent of whatever its command leaves behind while it runs (its subreaper), so that a command that is
killed is killed with everything that it started, whatever sessions and groups that made. What is left when a command
ends by itself goes on, as it would in a shell, and its keeper ends, so that the next command has one without children.
Keepers are forked ahead and used again: to fork this interpreter takes longer than many a command.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

from . import changes, files, processes
from .users import User

_MESSAGE_BYTES: Final = 64 << 10

Job = dict[str, Any]
"""What a keeper is to do, as the user `user`.

Either a command: `argv`; `workdir`; `environment`, all its variables; and `merged`, true if its standard error goes
where its standard output does. Or a function of `files` or `changes`: `function`, with its arguments.
"""


class Task(NamedTuple):
    """What a keeper does.

    Attributes:
        keeper: The keeper, which says how it ended (`answer_of`).
        input: Where its standard input is written to.
        outputs: Where its standard output and error are read from, by descriptor.
        is_function: True if it is a function.
    """

    keeper: Keeper
    input: int
    outputs: dict[int, str]
    is_function: bool


class Keeper(NamedTuple):
    """A keeper.

    Attributes:
        process: Its id.
        control: Where it is told what to do, and says how that ended; closed when it has ended.
    """

    process: int
    control: socket.socket

    def begin(self, job: Job) -> Task:
        """Have it do something.

        Raises:
            OSError: It is gone.
        """
        pipes = [os.pipe() for _ in range(3)]
        (stdin, write), (read, stdout), (errors, stderr) = pipes
        # A file in memory never blocks whoever writes it, even if the keeper has been stopped.
        order = os.memfd_create("job")
        try:
            os.write(order, json.dumps(job).encode("utf-8", "surrogatepass"))
            socket.send_fds(self.control, [b"job"], [order, stdin, stdout, stderr])
        except OSError:
            for descriptor in (write, read, errors):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (order, stdin, stdout, stderr):
                os.close(descriptor)
        for descriptor in (write, read, errors):
            os.set_blocking(descriptor, False)
        return Task(self, write, {read: "stdout", errors: "stderr"}, "function" in job)

    def kill(self, *, is_function: bool) -> None:
        """End what it does, with all that this has started."""
        with contextlib.suppress(OSError):
            if is_function:
                # It may wait for ever within the system.
                os.kill(self.process, signal.SIGKILL)
            else:
                self.control.send(b"kill")
                # The command may have stopped it.
                os.kill(self.process, signal.SIGCONT)

    def answer(self) -> dict[str, Any]:
        """How a task has ended: `status`, `memory` in KiB and `free`, true if it takes another; or `error` and `errno`.

        Raises:
            BlockingIOError: It has not ended.
        """
        try:
            told = self.control.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            told = b""
        with contextlib.suppress(ValueError):
            if isinstance(answer := json.loads(told), dict):
                return answer
        # The keeper itself was killed: by the command, or by the system for want of memory.
        return {"status": signal.SIGKILL.value, "unkept": True}

    def drop(self) -> None:
        """Have it end."""
        self.control.close()


def fork() -> Keeper:
    """Fork a keeper.

    Raises:
        OSError: The sandbox has too many processes, or no memory.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        process = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if process == 0:
        try:
            _keep(theirs.detach())
        finally:
            os._exit(70)
    theirs.close()
    ours.setblocking(False)
    return Keeper(process, ours)


def failure(error: OSError) -> dict[str, Any]:
    """What an operation's end says of an error of the system."""
    name = error.filename if isinstance(error.filename, str) else None
    return {"error": error.strerror or str(error), "errno": error.errno, "path": name}


def _keep(control: int) -> NoReturn:
    """Do one task after another, in the process that was forked for it."""
    signal.set_wakeup_fd(-1)
    os.closerange(3, control)
    os.closerange(control + 1, os.sysconf("SC_OPEN_MAX"))
    orders = socket.socket(fileno=control)
    wake, write = os.pipe()
    for descriptor in (wake, write):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    processes.become_reaper()
    os.setsid()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        # If memory runs out, a command ends before the server.
        file.write(b"500")
    while True:
        told, descriptors, _, _ = socket.recv_fds(orders, 16, 4)
        if not told:
            os._exit(0)
        if told != b"job":
            # A kill that crossed the end of what it was for.
            continue
        job, stdin, stdout, stderr = descriptors
        wanted = json.loads(os.pread(job, os.fstat(job).st_size, 0).decode("utf-8", "surrogatepass"))
        os.close(job)
        answer = _done(wanted, (stdin, stdout, stderr), orders, wake)
        with contextlib.suppress(OSError):
            orders.send(json.dumps(answer).encode())
        if not answer["free"]:
            os._exit(0)


def _done(wanted: Job, pipes: tuple[int, int, int], orders: socket.socket, wake: int) -> dict[str, Any]:
    """Do a task; returns its answer."""
    user = User(*wanted.pop("user"))
    try:
        if (name := wanted.pop("function", None)) is None:
            return _run(wanted, user, pipes, orders, wake)
        called: Callable[..., None] = getattr(changes if name in ("mark", "changed") else files, name)
        with _acting(user):
            called(input=pipes[0], output=pipes[1], **wanted)
        answer: dict[str, Any] = {"status": 0}
    except OSError as error:
        answer = failure(error)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}", "errno": errno.EINVAL}
    finally:
        for descriptor in pipes:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    return {**answer, "free": True}


def _run(wanted: Job, user: User, pipes: tuple[int, int, int], orders: socket.socket, wake: int) -> dict[str, Any]:
    """Run a command to its end, or until it is to be killed."""
    stdin, stdout, stderr = pipes
    with _acting(user, wholly=True):
        try:
            # What reads ahead of its output, or writes behind it, ends by a signal, as it does in a shell.
            started = subprocess.Popen(
                wanted["argv"],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.STDOUT if wanted["merged"] else stderr,
                cwd=wanted["workdir"],
                env=wanted["environment"],
                start_new_session=True,
            )
            # It is waited for below: the object would take its status away when it goes.
            process, started.returncode = started.pid, 0
        except OSError as error:
            if error.filename == wanted["workdir"]:
                raise OSError(error.errno, f"the working directory: {error.strerror}", error.filename) from error
            raise
    for descriptor in pipes:
        os.close(descriptor)
    status: int | None = None
    while status is None:
        ready, _, _ = select.select([orders.fileno(), wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, _MESSAGE_BYTES)
        status, memory = processes.reap().get(process, (None, None))
        if status is None and orders.fileno() in ready:
            orders.recv(16)
            status = processes.end_below(process=process)
    return {"status": status, "free": not _has_children(), **({} if memory is None else {"memory": memory})}


def _has_children() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


@contextlib.contextmanager
def _acting(user: User, *, wholly: bool = False) -> Any:
    """Be a user for a while: its files are open, and others are not.

    Args:
        wholly: For a program that is started meanwhile, which cannot become anybody else any more.
    """
    own = (os.getuid(), os.getgid())
    if (user.uid, user.gid) == own and (own[0] != 0 or not user.groups):
        # A server that is no root has no others to become.
        yield
        return
    groups = os.getgroups()
    try:
        with contextlib.suppress(PermissionError):
            # Where a user namespace has one user only, groups cannot be set.
            os.setgroups(user.groups)
        os.setresgid(user.gid if wholly else -1, user.gid, own[1])
        os.setresuid(user.uid if wholly else -1, user.uid, own[0])
    except OSError as error:
        _return(own, groups)
        raise OSError(
            error.errno, f"this sandbox cannot do anything as user {user.uid}:{user.gid}: {error.strerror}"
        ) from error
    try:
        yield
    finally:
        _return(own, groups)


def _return(own: tuple[int, int], groups: list[int]) -> None:
    os.setresuid(own[0], own[0], own[0])
    os.setresgid(own[1], own[1], own[1])
    with contextlib.suppress(PermissionError):
        os.setgroups(groups)
