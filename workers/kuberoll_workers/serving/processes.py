"""Killing processes that may start others meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import psutil

_ROUNDS = 10
_WAIT_SECONDS = 5


def kill_all(find: Callable[[], Iterable[psutil.Process]]) -> None:
    """Kill the processes that `find` returns until it returns none, at most 10 times."""
    for _ in range(_ROUNDS):
        processes = list(find())
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=_WAIT_SECONDS)
