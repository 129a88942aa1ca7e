"""The one time limit of many calls: each ends for its own time only, and as `asyncio.timeout` would end it."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from kuberoll_workers.rollouts.call_limit import CallLimit, LimitedCall


async def limited(limit: CallLimit, work: asyncio.Future[None]) -> None:
    with LimitedCall(limit):
        await work


async def test_a_call_that_exceeds_it_ends_and_the_task_goes_on() -> None:
    limit = CallLimit(0.01)
    with pytest.raises(TimeoutError):
        await limited(limit, asyncio.get_running_loop().create_future())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await limited(limit, asyncio.ensure_future(asyncio.sleep(0)))


async def test_only_calls_that_are_due_end() -> None:
    """Calls that begin, end and hang in any order: those that hang end, and all others return."""
    draw, limit = random.Random(7), CallLimit(0.05)
    loop = asyncio.get_running_loop()

    async def call(hangs: bool) -> str:
        await asyncio.sleep(draw.random() * 0.1)
        work: asyncio.Future[None] = loop.create_future()
        if not hangs:
            loop.call_soon(work.set_result, None)
        try:
            await limited(limit, work)
        except TimeoutError:
            return "late"
        return "done"

    hangs = [draw.random() < 0.5 for _ in range(200)]
    ends = await asyncio.gather(*(call(each) for each in hangs))
    assert ends == ["late" if each else "done" for each in hangs]


async def test_a_task_that_is_cancelled_is_not_late() -> None:
    limit = CallLimit(600.0)
    task = asyncio.ensure_future(limited(limit, asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_who_is_cancelled_from_outside_as_well_is_cancelled() -> None:
    limit, begun = CallLimit(0.01), asyncio.Event()

    async def stubborn() -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        # The limit has ended the call, and now somebody else ends the task.
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        await asyncio.sleep(0)

    async def work() -> None:
        with LimitedCall(limit):
            await stubborn()

    task = asyncio.ensure_future(work())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_an_error_of_the_call_is_its_own() -> None:
    limit = CallLimit(600.0)
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    work.set_exception(TimeoutError("the engine's"))
    with pytest.raises(TimeoutError, match="the engine's"):
        await limited(limit, work)


async def test_nothing_is_kept_of_calls_that_have_ended() -> None:
    limit = CallLimit(600.0)
    for _ in range(100):
        await limited(limit, asyncio.ensure_future(asyncio.sleep(0)))
    assert not limit._due
