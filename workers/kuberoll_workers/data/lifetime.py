"""Processes that end with their parents."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final

RUN_ID_VARIABLE: Final = "KUBEROLL_RUN_ID"
"""Variable that all processes of a run have, by which its watchdog finds them."""

RUN_SCRATCH_VARIABLE: Final = "KUBEROLL_RUN_SCRATCH"
"""Variable of a run's workers: a directory that its watchdog removes, however the run ends."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, however it ends (Linux only)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def watch_parent(pipe: int, parent: int, *, end: Callable[[], None] = lambda: os._exit(1)) -> None:
    """End this process when its parent's end of a pipe has closed and the parent is gone.

    A fallback for `end_with_parent` that works on all systems, but only while Python code runs.

    Args:
        pipe: Descriptor of a pipe that the parent keeps open; its data is discarded.
        parent: The parent's process id; while it lives, a closed pipe is ignored.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            # Not with a file object, which cannot be closed at exit while a thread waits in it.
            while os.read(pipe, 4096):
                continue
        if os.getppid() != parent:
            end()

    threading.Thread(target=watch, name="kuberoll-parent", daemon=True).start()
