"""Wait of a warm sandbox's server for its claim, which brings the configuration."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Final

from aiohttp import web

_POLL_SECONDS: Final = 0.25


async def wait_for_claim(path: Path, *, host: str, port: int) -> bool:
    """Wait until a file has content, and answer all requests with 503 meanwhile, so that probes of the port succeed.

    Returns:
        False if the process was told to stop before that.

    Raises:
        OSError: The address cannot be listened at.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", _not_claimed)
    runner = web.AppRunner(application, access_log=None)
    try:
        await runner.setup()
        await web.TCPSite(runner, host, port, backlog=128).start()
        while not stopped.is_set() and not _has_content(path):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await stopped.wait()
    finally:
        await runner.cleanup()
    return not stopped.is_set()


async def _not_claimed(_: web.Request) -> web.Response:
    return web.Response(status=503, text="this sandbox has not been claimed\n")


def _has_content(path: Path) -> bool:
    """A volume of the downward API has an empty file for an annotation that is not there; it is replaced as a whole."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
