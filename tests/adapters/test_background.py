"""A loop for connections, which several threads may begin to use at once."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kuberoll_workers.adapters.background import BackgroundLoop

THREADS = 8


@pytest.fixture
def threads_that_alternate() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_that_alternate")
def test_threads_that_begin_at_once_have_one_loop() -> None:
    async def own() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(30):
            background, together = BackgroundLoop(), threading.Barrier(THREADS)

            def used(background: BackgroundLoop = background, together: threading.Barrier = together) -> object:
                together.wait()
                return background.wait(own())

            assert len({*pool.map(lambda _, used=used: used(), range(THREADS))}) == 1
            background.stop()


def test_a_loop_that_was_stopped_starts_again() -> None:
    async def five() -> int:
        return 5

    background = BackgroundLoop()
    for _ in range(2):
        assert background.wait(five()) == 5
        background.stop()
