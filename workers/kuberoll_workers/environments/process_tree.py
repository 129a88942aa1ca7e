"""Processes below a process, as /proc has them.

`/proc/PID/task/TID/children` needs no look at the other processes of the machine; without it (a kernel built without
CONFIG_PROC_CHILDREN) all are read.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator


def children(process: int) -> list[int]:
    """Process ids of the children of all threads of a process; none if it is gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(ProcessLookupError), open(f"/proc/{process}/task/{thread}/children") as file:
                found.extend(map(int, file.read().split()))
    except FileNotFoundError:
        return _children_of_all(process) if os.path.exists(f"/proc/{process}") else []
    except (ProcessLookupError, PermissionError):
        return []
    return found


def descendants(process: int) -> Iterator[int]:
    """Process ids of everything below a process."""
    waiting = children(process)
    seen = set()
    while waiting:
        child = waiting.pop()
        if child not in seen:
            seen.add(child)
            yield child
            waiting.extend(children(child))


def end_all(process: int, *, seconds: float, sweep: Callable[[], None] = lambda: None) -> int:
    """Kill everything below this process, and wait until nothing is left; returns the wait status of one child.

    This process must be the subreaper of what it has started, so that orphans come back to it whatever session they are
    in: none is left when it has no child anymore.

    Args:
        process: The child; -1 is returned as its status if it was waited for before.
        seconds: Time limit.
        sweep: Called each time before the processes are killed one by one.

    Raises:
        TimeoutError: Some cannot be killed.
    """
    status = -1
    deadline = time.monotonic() + seconds
    while True:
        sweep()
        for found in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(found, signal.SIGKILL)
        try:
            ended, how = os.waitpid(-1, os.WNOHANG)
            while ended:
                status = how if ended == process else status
                ended, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if time.monotonic() > deadline:
            raise TimeoutError("processes cannot be killed")
        # Killed, but not dead yet.
        time.sleep(0.0005)


def tasks(processes: Iterable[int]) -> int:
    """Number of threads of processes."""
    count = 0
    for process in processes:
        with contextlib.suppress(OSError):
            count += len(os.listdir(f"/proc/{process}/task"))
    return count


def resident(process: int) -> int:
    """Resident and swapped bytes of a process that are not of files; 0 if it is gone."""
    total = 0
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{process}/status") as file:
        for line in file:
            if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")):
                total += int(line.split()[1]) << 10
    return total


def proportional(process: int) -> int:
    """`resident` with its share of what it shares with others, which is slower; all of it, if the share is closed."""
    total = 0
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            for line in file:
                if line.startswith(("Pss_Anon:", "Pss_Shmem:", "SwapPss:")):
                    total += int(line.split()[1]) << 10
    except PermissionError:
        return resident(process)
    except (OSError, ValueError):
        return 0
    return total


def unlinked(process: int) -> dict[tuple[int, int], int]:
    """Bytes on disk of the open files of a process that have no name anymore, by device and inode."""
    found = {}
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{process}/fd/{number}")
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


def mapped_unlinked(process: int, directory: str) -> set[bytes]:
    """Files of a directory that a process has mapped and that have no name anymore, each by device and inode.

    Raises:
        PermissionError: The process is closed to this one.
    """
    found = set()
    beginning = os.fsencode(directory) + b"/"
    try:
        with open(f"/proc/{process}/maps", "rb") as file:
            for line in file:
                # Address, rights, offset, device, inode, path.
                fields = line.rstrip(b"\n").split(None, 5)
                if len(fields) == 6 and fields[5].startswith(beginning) and fields[5].endswith(b" (deleted)"):
                    found.add(b" ".join(fields[3:5]))
    except PermissionError:
        raise
    except OSError:
        # It is gone.
        return set()
    return found


def group_of(thread: int) -> int:
    """Process of a thread; the number itself if it is gone."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{thread}/status") as file:
        for line in file:
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    return thread


def _stat(process: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the third on: the name before may contain spaces and brackets."""
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _children_of_all(process: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                if int(_stat(int(name))[1]) == process:
                    found.append(int(name))
    return found
