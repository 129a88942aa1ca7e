"""Processes that can be found by what is in their environment, whatever sessions and parents they have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psutil

from kuberoll_workers.serving.processes import kill_all

CONTAINER_VARIABLE = "KUBEROLL_TEST_CONTAINER"
"""In the environment of everything that runs in a container: `<pod uid>/<container>`."""


def marked(marker: str) -> Iterator[psutil.Process]:
    """All processes of a container."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(CONTAINER_VARIABLE) == marker:
                yield process
        except psutil.Error:
            continue


async def end_marked(marker: str) -> None:
    """Kills them, those too that they start meanwhile."""
    await asyncio.to_thread(kill_all, lambda: marked(marker))
