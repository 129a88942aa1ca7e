"""Processes that end with the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent has ended, however it ended (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def watch_parent(pipe: int, parent: int, *, end: Callable[[], None] = lambda: os._exit(1)) -> None:
    """End this process when its parent's end of a pipe has closed and the parent is gone.

    The net below `end_with_parent`: it works everywhere, but only while Python runs.

    Args:
        pipe: Descriptor of what the parent writes to and keeps open; whatever comes is thrown away.
        parent: Its process id. A parent that lives may close the pipe.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            # Not by a file object: one that a thread waits in cannot be closed when Python ends.
            while os.read(pipe, 4096):
                continue
        if os.getppid() != parent:
            end()

    threading.Thread(target=watch, name="kuberoll-parent", daemon=True).start()
