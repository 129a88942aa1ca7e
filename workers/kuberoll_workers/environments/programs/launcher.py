"""Launcher of programs: a small process that forks a supervisor for each.

python -m kuberoll_workers.environments.programs.launcher CONTROL [supervise-signals]

CONTROL is the descriptor of a socket, over which the client sends the socket of each program. The launcher ends when it
is closed. If a supervisor is killed, the launcher kills what it leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys

from kuberoll_workers.environments import landlock, process_access, process_tree
from kuberoll_workers.environments.programs import confinement, supervisor, system_calls
from kuberoll_workers.environments.programs.model import ConfinementUnavailable

_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 1.0


def check() -> None:
    """Find out whether programs can be confined here.

    Raises:
        ConfinementUnavailable: A layer is missing.
    """
    if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
        raise ConfinementUnavailable("it takes Linux on x86-64 or 64-bit ARM")
    version = landlock.abi()
    if version < confinement.LANDLOCK_ABI:
        found = f"version {version}" if version else "none, or it is switched off, or a seccomp profile forbids it"
        raise ConfinementUnavailable(
            f"the kernel's Landlock must be version {confinement.LANDLOCK_ABI} (Linux 6.2) or later; found: {found}. "
            "Use nodes with a newer kernel; gVisor has no Landlock"
        )
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most <= system_calls.CHANNEL:
        raise ConfinementUnavailable(f"the limit of open files is {most}; it must be above {system_calls.CHANNEL}")
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        seen = process_tree.resident(child) > 0 and child in process_tree.children(os.getpid())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not seen:
        raise ConfinementUnavailable(
            "/proc does not show this process's children, so their memory cannot be limited: with isolation Process, "
            "set access.readablePaths: [/proc]"
        )


def serve(control: socket.socket, filter: system_calls.Filter, *, signals_are_scoped: bool) -> None:
    """Fork a supervisor for each program until the control socket is closed."""
    supervisors: set[int] = set()
    poll = select.poll()
    poll.register(control, select.POLLIN | select.POLLHUP)
    while True:
        ready = poll.poll(1000 * _POLL_SECONDS)
        _reap(supervisors)
        if not ready:
            continue
        message, clients, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        process = os.fork()
        if process == 0:
            code = 70
            try:
                control.close()
                supervisor.supervise(socket.socket(fileno=clients[0]), filter, signals_are_scoped=signals_are_scoped)
                code = 0
            finally:
                os._exit(code)
        supervisors.add(process)
        os.close(clients[0])


def _reap(supervisors: set[int]) -> None:
    killed = False
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            killed |= process in supervisors and status != 0
            supervisors.discard(process)
    if killed:
        for process in set(process_tree.children(os.getpid())) - supervisors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def main() -> None:
    """Entry point of the process: the first message is `ok`, or why programs cannot be confined."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process_access.drop_capabilities()
    try:
        check()
        scoped = landlock.abi() >= confinement.LANDLOCK_ABI_WITH_SIGNALS and "supervise-signals" not in sys.argv[2:]
        filter = system_calls.build(signals_are_scoped=scoped)
    except ConfinementUnavailable as error:
        control.sendall(json.dumps(str(error)).encode() + b"\n")
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most) if most != resource.RLIM_INFINITY else 4096, most))
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Of what is here, forked processes copy only what they change.
    gc.collect()
    gc.freeze()
    control.sendall(b'"ok"\n')
    serve(control, filter, signals_are_scoped=scoped)


if __name__ == "__main__":
    main()
