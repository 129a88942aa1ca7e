"""Bodies that are too large or too slow, and work that would hold up everybody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

import pytest
from starlette.requests import Request
from starlette.types import Message

from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.serving.bodies import BodyRefused, read_body
from kuberoll_workers.serving.executor import BoundedExecutor


def request(parts: Iterable[bytes], *, length: str | None = None, ends: bool = True) -> Request:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    coming = iter([*messages, {"type": "http.request", "body": b"", "more_body": False}] if ends else messages)

    async def receive() -> Message:
        for message in coming:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    headers = [] if length is None else [(b"content-length", length.encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


async def test_a_body_is_all_of_its_parts() -> None:
    assert await read_body(request([b"a", b"", b"bc"]), max_bytes=3) == b"abc"


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    with pytest.raises(BodyRefused, match="more than 1,000 bytes") as refused:
        await read_body(request([], length="1001", ends=False), max_bytes=1000)
    assert refused.value.status == 413


async def test_a_body_that_is_larger_than_it_says_is_refused() -> None:
    for length in (None, "3", "-1", "many"):
        with pytest.raises(BodyRefused) as refused:
            await read_body(request([b"x" * 600] * 2, length=length, ends=False), max_bytes=1000)
        assert refused.value.status == 413


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with pytest.raises(BodyRefused, match="did not arrive within") as refused:
        await read_body(request([b"a"], ends=False), seconds=0.01)
    assert refused.value.status == 408


class Held:
    """Work that runs until it is let go."""

    def __init__(self) -> None:
        self.go_on, self.begun = threading.Event(), threading.Semaphore(0)
        self.count = 0

    def work(self) -> int:
        self.count += 1
        self.begun.release()
        assert self.go_on.wait(60)
        return self.count


async def places(executor: BoundedExecutor, count: int) -> None:
    """Wait until so many are taken."""
    while executor.pending != count:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)


async def test_callers_who_go_away_free_their_places() -> None:
    executor, held = BoundedExecutor(threads=1, max_waiting=4), Held()
    running = asyncio.create_task(executor.run(held.work))
    await asyncio.to_thread(held.begun.acquire)
    waiting = [asyncio.create_task(executor.run(held.work)) for _ in range(3)]
    await places(executor, 4)
    with pytest.raises(PolicyUnavailable, match="4 requests are being prepared"):
        await executor.run(held.work)
    for task in waiting:
        task.cancel()
    await places(executor, 1)
    # One that is under way cannot be stopped; it was begun once, and those who waited never were.
    running.cancel()
    held.go_on.set()
    await places(executor, 0)
    assert held.count == 1
    assert await executor.run(lambda: "as before") == "as before"
    executor.close()


async def test_what_is_not_done_in_time_is_not_waited_for() -> None:
    executor, held = BoundedExecutor(threads=1, seconds=0.01), Held()
    with pytest.raises(PolicyUnavailable, match="not prepared within"):
        await executor.run(held.work)
    held.go_on.set()
    executor.close()


async def test_what_the_work_raises_is_the_caller_s() -> None:
    executor = BoundedExecutor()
    with pytest.raises(ZeroDivisionError):
        await executor.run(lambda: 1 // 0)
    executor.close()
