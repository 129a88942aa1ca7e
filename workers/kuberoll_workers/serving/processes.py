"""Killing processes that may start others meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import psutil

_ROUNDS = 10
_WAIT_SECONDS = 5
_TRACKER_SECONDS = 2
_TRACKER = "multiprocessing.resource_tracker"


def kill_all(find: Callable[[], Iterable[psutil.Process]]) -> None:
    """Kill the processes that `find` returns until it returns none, at most 10 times.

    Resource trackers of `multiprocessing` are left for last: once the processes that use them are gone, they remove
    the shared memory and the semaphores of these, and end by themselves.
    """
    for _ in range(_ROUNDS):
        processes = list(find())
        if not processes:
            return
        trackers = list(filter(_is_tracker, processes))
        others = [process for process in processes if process not in trackers]
        # A tracker that also serves a process that `find` does not return would wait for ever.
        _kill(others or psutil.wait_procs(trackers, timeout=_TRACKER_SECONDS)[1])


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_WAIT_SECONDS)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any(_TRACKER in argument for argument in process.cmdline())
    except psutil.Error:
        return False
