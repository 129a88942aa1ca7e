"""Imports of large libraries at the start of a process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Suspend garbage collection, and leave what exists at the end out of later collections.

    Imports of PyTorch and vLLM create a million objects, nearly all of which stay. Collections in between visit all of
    them and take a fifth of the time; each full collection afterwards would stop the process for a quarter of a second.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()
