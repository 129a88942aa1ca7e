"""Exit codes of all descendants of this process.

Ray starts a replica, the replica starts vLLM's engine, and the engine its workers. A process learns the exit codes of
its own children only, and neither Ray nor vLLM reports all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
from pathlib import Path, PurePath

import psutil

_SCAN_SECONDS = 0.5

# `struct pidfd_info` of linux/pidfd.h in its first version: mask, cgroup, 11 ids, wait status. Linux 6.15 and later
# fill in the status once the process is reaped.
_INFO = struct.Struct("=QQ11Ii")
_INFO_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11


class ExitWatcher:
    """Watches all descendants of this process from a thread, and records those killed by signals.

    Before Linux 6.15 an exit status can be read only until the parent has reaped the process, so that some are missed.
    On other systems all are.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _WatchedProcess] = {}
        self._killed: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stopped = False
        # The thread ends when the other end of this pipe is closed.
        self._end, self._ending = os.pipe()
        self._thread = threading.Thread(target=self._run, name="kuberoll-exit-watcher", daemon=True)

    def start(self) -> None:
        """Start the thread; does nothing on systems without pidfds."""
        if hasattr(os, "pidfd_open"):
            self._thread.start()

    def stop(self) -> None:
        """End the thread; recorded exit codes stay available."""
        self._stopped = True
        os.close(self._ending)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._end)
        for watched in self._watched.values():
            os.close(watched.handle)
        self._watched.clear()

    def scan(self) -> None:
        """Watch the processes that were started since the last scan."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                # Titles change: a worker of Ray has none until it runs an actor.
                name = _name(process)
                with self._lock:
                    if (watched := self._watched.get(process.pid)) is None:
                        self._watched[process.pid] = _WatchedProcess(os.pidfd_open(process.pid), name)
                    else:
                        watched.name = name

    def signal_exits(self) -> dict[str, int]:
        """Exit codes of processes killed by signals (negative signal numbers), by name, in order of death."""
        if not self._stopped:
            self._take(0)
        with self._lock:
            return dict(self._killed)

    def _run(self) -> None:
        while not self._take(_SCAN_SECONDS):
            self.scan()

    def _take(self, seconds: float) -> bool:
        """Wait for processes to end and record their exit codes; True if the thread should end."""
        with self._lock:
            handles = {watched.handle: pid for pid, watched in self._watched.items()}
        poll = select.poll()
        for handle in (self._end, *handles):
            poll.register(handle, select.POLLIN)
        ready = {handle for handle, _ in poll.poll(seconds * 1000)}
        for handle in ready - {self._end}:
            self._note(handles[handle], handle)
        return self._end in ready

    def _note(self, pid: int, handle: int) -> None:
        with self._lock:
            watched = self._watched.get(pid)
            if watched is None or watched.handle != handle:
                return
            del self._watched[pid]
            code = _exit_code(pid, handle)
            os.close(handle)
            if code is not None and code < 0:
                self._killed.setdefault(watched.name, code)


class _WatchedProcess:
    """A running process; `handle` is a pidfd, which becomes readable when it exits."""

    def __init__(self, handle: int, name: str) -> None:
        self.handle = handle
        self.name = name


def _exit_code(pid: int, handle: int) -> int | None:
    """Exit code of a process that has ended, as in `subprocess`; None if unknown."""
    # First, because the parent is about to reap it.
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[-1]))
    info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    with contextlib.suppress(OSError, ValueError):
        fcntl.ioctl(handle, _GET_INFO, info)
        mask, *_, status = _INFO.unpack(info)
        if mask & _INFO_EXIT:
            return os.waitstatus_to_exitcode(status)
    return None


def _name(process: psutil.Process) -> str:
    """Process title without Ray's and vLLM's additions (`ray::Actor.method`, `VLLM::EngineCore`), or the program."""
    program = (process.cmdline() or [process.name()])[0]
    title = program.rpartition("::")[2]
    return title.partition(".")[0] if title != program else PurePath(program).name
