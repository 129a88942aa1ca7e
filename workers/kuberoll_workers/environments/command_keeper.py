"""Keeper of one command of an agent: when it reports the command's end, nothing that the command started is left.

python -m kuberoll_workers.environments.command_keeper CONTROL

CONTROL is the descriptor of a socket. A line of JSON comes over it: `argv`, `directory`, `scratch`, and `access`, null
for access without limits. The answer is a line with `status`, the command's wait status, or `error`. When the other end
is closed, the command ends. Standard input, output and error, and the variables, are the command's.

Orphans become the keeper's children (it is their subreaper), whatever sessions and groups they made. Where Landlock
keeps the keeper's signals within what it started, one signal kills all of that at once, so that none can fork
meanwhile; otherwise it kills until it has no child. If the keeper itself is killed there is no answer, and nothing is
scored.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from kuberoll_workers.environments import landlock, process_tree
from kuberoll_workers.environments.process_access import ProcessAccess, enter, hide_from_others

END_SECONDS = 30.0
"""Time in which killed processes must be gone."""

_SET_PDEATHSIG, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 4, 36
_LINE_BYTES = 1 << 22


def keep(control: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    """Run a command to its end, or until the control socket is closed; returns the answer."""
    limited = request["access"] is not None
    # Signals can then only be sent to what is started here, by this process, too.
    scoped = limited and landlock.restrict_signals()
    trouble, told = os.pipe2(os.O_CLOEXEC)
    process = os.fork()
    if process == 0:
        _become(request, told)
    os.close(told)
    devnull = os.open(os.devnull, os.O_RDWR)
    # What reads its output, or writes its input, sees when the command has closed it.
    for number in (0, 1, 2):
        os.dup2(devnull, number)
    with os.fdopen(trouble, "rb") as file:
        # Closed when the program is executed.
        text = file.read().decode("utf-8", "replace")
    _wait(process, control)
    try:
        status = process_tree.end_all(process, seconds=END_SECONDS, sweep=_sweep if scoped else lambda: None)
    except TimeoutError:
        return {"error": f"processes that it started cannot be killed within {END_SECONDS:g} s"}
    return {"error": text} if text else {"status": status}


def _wait(process: int, control: socket.socket) -> None:
    """Wait for the end of the command, or of the other side, and reap orphans meanwhile."""
    ended = os.pidfd_open(process)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control, select.POLLIN | select.POLLHUP)
    while not poll.poll(1000):
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid == process:
                    break
                os.waitpid(found.si_pid, 0)
    os.close(ended)


def _sweep() -> None:
    """Kill everything that this process may send signals to, which is what it started; atomically."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(os.getppid(), 0)
        except PermissionError:
            # The parent is out of reach, so is everything else outside.
            os.kill(-1, signal.SIGKILL)


def _become(request: dict[str, Any], told: int) -> None:
    """Become the command, in the forked process; does not return."""
    try:
        keeper = os.getppid()
        os.setsid()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.closerange(3, told)
        os.closerange(told + 1, 65536)
        if request["access"] is not None:
            # A process that is closed to others cannot make namespaces.
            libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
            enter(ProcessAccess(**request["access"]), scratch=request["scratch"])
        os.chdir(request["directory"])
        os.execvp(request["argv"][0], request["argv"])
    except BaseException as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        with contextlib.suppress(BaseException):
            os.write(told, f"could not be started: {reason}".encode()[:4000])
    finally:
        os._exit(127)


def main() -> None:
    """Entry point of the process."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    hide_from_others()
    with control.makefile("rb") as lines:
        line = lines.readline(_LINE_BYTES)
    if not line:
        return
    answer = keep(control, json.loads(line))
    with contextlib.suppress(OSError):
        control.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
