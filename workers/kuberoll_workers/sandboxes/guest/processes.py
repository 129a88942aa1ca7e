"""Processes of a sandbox that this server knows of: their end, and its own place among them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from typing import Final

END_SECONDS: Final = 10.0
"""Time in which killed processes must be gone."""

_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36
_PAUSE_SECONDS: Final = 0.0005
_SIGNAL_SET_BYTES: Final = 128
# `signalfd(2)`: number, errno, code and the sender's id are the first of 128 bytes.
_SIGNAL: Final = struct.Struct("IiiI112x")
_libc = ctypes.CDLL(None, use_errno=True)

# Of `struct rusage`: two times of two numbers each come before the number of KiB.
_USAGE_LONGS, _MOST_RESIDENT = 32, 4


def end_others(*, seconds: float = END_SECONDS) -> int:
    """Kill every process but this one, which must be the first of its PID namespace.

    Returns:
        The number of processes that are left, such as of a user that this one may not send signals to.
    """
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # All at once, so that none can start another meanwhile; it never reaches the first one itself.
            os.kill(-1, signal.SIGKILL)
        reap()
        left = sum(1 for pid in _processes() if pid != os.getpid())
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_PAUSE_SECONDS)


def end_below(*, process: int, seconds: float = END_SECONDS) -> int:
    """Kill everything below this process, which is its subreaper.

    Args:
        process: One of its children.

    Returns:
        The wait status of that child.
    """
    deadline = time.monotonic() + seconds
    status = signal.SIGKILL.value
    while time.monotonic() < deadline:
        for found in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(found, signal.SIGKILL)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0] > 0:
                status = ended[1] if ended[0] == process else status
        except ChildProcessError:
            return status
        time.sleep(_PAUSE_SECONDS)
    return status


def reap() -> dict[int, tuple[int, int]]:
    """Wait status of the children that have ended, by id, and most memory of a process of theirs, in KiB.

    By `wait4(2)` itself: Python's needs the module `resource`, which a sandbox does not have.
    """
    found = {}
    status, used = ctypes.c_int(), (ctypes.c_long * _USAGE_LONGS)()
    while (process := _libc.wait4(-1, ctypes.byref(status), os.WNOHANG, used)) > 0:
        found[process] = (status.value, used[_MOST_RESIDENT])
    return found


def close_to_others() -> None:
    """Close this process's memory and limits to processes of the same user, except those with further rights."""
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    with contextlib.suppress(OSError):
        # `prlimit(2)` takes a group id that all three of this process are. Commands do not inherit it (`execve(2)`).
        os.setresgid(-1, -1, os.getgid() + 1)


def become_reaper() -> None:
    """Become the parent of orphans below this process."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def watch_termination() -> int:
    """Have SIGTERM wait instead of ending this process; returns a descriptor that tells of it (`is_from_outside`)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    # Python's own handler would make an error of what no one but the kernel may do: end the first process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signals = ctypes.create_string_buffer(_SIGNAL_SET_BYTES)
    _libc.sigaddset(signals, signal.SIGTERM)
    descriptor: int = _libc.signalfd(-1, signals, os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def is_from_outside(descriptor: int) -> bool:
    """Read what a descriptor tells of signals; True if one was sent from outside of the sandbox."""
    found = os.read(descriptor, 64 * _SIGNAL.size)
    # The sender's id in this PID namespace: outside of it nobody has one.
    return os.getpid() != 1 or any(fields[3] == 0 for fields in _SIGNAL.iter_unpack(found))


def descendants(process: int) -> Iterator[int]:
    """Ids of everything below a process."""
    below: dict[int, list[int]] = {}
    for pid in _processes():
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            # The name may have spaces and brackets.
            below.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(pid)
    waiting = below.get(process, [])
    while waiting:
        found = waiting.pop()
        yield found
        waiting.extend(below.get(found, ()))


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def log(text: str) -> None:
    """Write a line to the sandbox's own log."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
