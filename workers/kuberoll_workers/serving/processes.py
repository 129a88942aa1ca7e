"""Ending processes that may start others while they are ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import psutil

_ROUNDS = 10
_WAIT_SECONDS = 5


def kill_all(find: Callable[[], Iterable[psutil.Process]]) -> None:
    """Kill what `find` finds until it finds nothing, a bounded number of times."""
    for _ in range(_ROUNDS):
        found = list(find())
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=_WAIT_SECONDS)
