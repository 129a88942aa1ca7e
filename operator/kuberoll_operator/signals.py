"""Signals that end a process."""

from __future__ import annotations

import asyncio
import signal


def set_on_end(stop: asyncio.Event) -> None:
    """Have SIGTERM and SIGINT set an event."""
    try:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
    except (NotImplementedError, RuntimeError, ValueError):
        # Signals only reach the main thread; in another thread the caller sets the event.
        return
