"""Waiting for what the system, or an engine, does by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SECONDS = 60.0


async def until(holds: Callable[[], object], what: str, *, seconds: float = SECONDS) -> None:
    """Wait until something holds, which is asked in a thread.

    Raises:
        AssertionError: It does not within that time.
    """
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.05)
