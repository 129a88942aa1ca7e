"""Supervisor of one environment process and everything that it starts: at the end, all of these processes are gone.

python -m kuberoll_workers.environments.keeper CHANNEL CONTROL SCRATCH [server]

CHANNEL and CONTROL are descriptors: the socket of the environment's process, and a pipe whose other end the worker
holds. With `server`, the process serves the environment over HTTP. The keeper kills everything when that end is closed,
on purpose or because the worker died, or when the environment's process has ended; then it removes the directory
SCRATCH and exits in the same way as that process. Printed output goes to standard error, up to a limit.

Orphaned processes become the keeper's children (it is their "subreaper"), so none escapes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import time

from kuberoll_workers.environments import process_tree

PRINTED_BYTES = 256 << 10
PRINTED_BYTES_PER_SECOND = 4 << 10
"""Limits of the printed output: an initial amount, and an average rate. The rest is dropped."""

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_END_SECONDS = 10.0


class _Printed:
    """Forwards printed output, within limits."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._passed = 0
        self._dropping = False

    def take(self, data: bytes) -> None:
        allowed = PRINTED_BYTES + int(PRINTED_BYTES_PER_SECOND * (time.monotonic() - self._since)) - self._passed
        self._write(data[: max(0, allowed)])
        self._passed += min(len(data), max(0, allowed))
        if len(data) > allowed and not self._dropping:
            self._write(b"\n[an environment prints too much: some of its output is omitted here]\n")
        self._dropping = len(data) > allowed

    @staticmethod
    def _write(data: bytes) -> None:
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(2, data) :]


def keep(process: int, *, printed: int, control: int) -> int:
    """Wait for the end of the process or of the worker, then kill all descendants; returns its wait status."""
    ended = os.pidfd_open(process)
    poll = select.poll()
    for descriptor in (ended, control, printed):
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
    passed = _Printed()
    over = False
    while not over:
        for descriptor, _ in poll.poll():
            if descriptor != printed:
                over = True
            elif data := os.read(printed, 1 << 16):
                passed.take(data)
            else:
                poll.unregister(printed)
        # This process must reap the environment's orphans.
        _bury(process)
    status = _end_all(process)
    os.set_blocking(printed, False)
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):
            if not (data := os.read(printed, 1 << 16)):
                break
            passed.take(data)
    return status


def _bury(process: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid == process:
                return
            os.waitpid(found.si_pid, 0)


def _end_all(process: int) -> int:
    status = 0
    deadline = time.monotonic() + _END_SECONDS
    with contextlib.suppress(ProcessLookupError):
        # The whole group at once: this also stops processes that fork faster than they can be killed one by one.
        os.killpg(process, signal.SIGKILL)
    while time.monotonic() < deadline:
        for child in process_tree.children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == process:
            status = ended
        elif pid == 0:
            # Killed, but not dead yet.
            time.sleep(0.001)
    return status


def _become_environment(channel: int, printed: int, *, server: bool) -> None:
    """Run the environment, or its server, in this forked process; does not return."""
    code = 70
    try:
        os.setsid()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        for low, high in ((3, channel), (channel + 1, 65536)):
            os.closerange(low, high)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            # If memory runs out, the environment is killed before the worker.
            file.write("500")
        if server:
            from kuberoll_api import plugins

            serve = plugins.load(plugins.ISOLATIONS, "Remote").serve
        else:
            from kuberoll_workers.environments.child import serve
        serve(socket.socket(fileno=channel))
        code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201
    finally:
        os._exit(code)


def main() -> None:
    """Entry point of the process."""
    channel, control, scratch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        _become_environment(channel, writing, server=sys.argv[4:] == ["server"])
    os.close(channel)
    os.close(writing)
    status = keep(process, printed=reading, control=control)
    shutil.rmtree(scratch, ignore_errors=True)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
