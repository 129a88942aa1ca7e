"""Who tries when there is room."""

from __future__ import annotations

import asyncio

from kuberoll_operator.broker.room import Room
from tests.operator.emulator import in_virtual_time


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_each_that_leaves_lets_the_next_one_try() -> None:
    async def main() -> None:
        room, tried = Room(), []

        async def one(number: int) -> None:
            await room.wait(1000.0, room.left)
            tried.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(5)]
        await _settled()
        room.leave()
        await _settled()
        assert tried == [0]
        room.leave()
        room.enter()
        await _settled()
        assert tried == [0, 1, 2]
        # Who was woken and is cancelled leaves its turn to the next one.
        room.leave()
        tasks[3].cancel()
        await _settled()
        assert tried == [0, 1, 2, 4]
        assert asyncio.get_running_loop().time() == 0
        # Nobody waits: nothing is kept for later, but that somebody has left.
        left = room.left
        room.leave()
        await room.wait(1000.0, left)
        assert asyncio.get_running_loop().time() == 0

    in_virtual_time(main())


def test_one_tries_after_a_while_in_any_case() -> None:
    async def main() -> None:
        room = Room()
        await room.wait(15.0, room.left)
        assert asyncio.get_running_loop().time() == 15
        # It waits no more, and takes nobody's turn.
        other = asyncio.create_task(room.wait(1000.0, room.left))
        await _settled()
        room.leave()
        await other
        assert asyncio.get_running_loop().time() == 15

    in_virtual_time(main())
