"""A worker's feed: who waits, how far back it reaches, and what is written for whom."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.output.fed_parts import FedPart, FedParts
from kuberoll_workers.output.part_feed import PartFeed


class Hurries:
    """A journal that counts how often it was to hurry."""

    def __init__(self) -> None:
        self.count = 0

    def hurry(self) -> None:
        self.count += 1


async def started(feed: PartFeed) -> FedParts:
    answer = await feed.after("", 0, 60.0)
    assert answer.gap
    return answer


async def waiting(feed: PartFeed, after: FedParts, seconds: float = 60.0) -> asyncio.Task[FedParts]:
    """A request that waits."""
    task = asyncio.create_task(feed.after(after.epoch, after.next, seconds))
    await asyncio.sleep(0)
    return task


async def test_who_waits_has_the_next_part_and_then_those_that_came_meanwhile() -> None:
    feed = PartFeed()
    feed.attach([], shards=[2])
    first = await started(feed)
    assert (first.shards, first.parts) == ([2], [])
    task = await waiting(feed, first)
    feed.written("a-1", b"1\n")
    answer = await task
    assert answer.parts == [FedPart("a-1", b"1\n")]
    feed.written("a-2", b"2\n")
    feed.written("b-1", b"3\n")
    answer = await feed.after(answer.epoch, answer.next, 60.0)
    assert [part.file for part in answer.parts] == ["a-2", "b-1"]
    task = await waiting(feed, answer, seconds=0.0)
    assert ((await task).parts, (await task).next) == ([], answer.next)


async def test_it_hurries_for_those_who_wait_and_for_what_has_ended_only() -> None:
    journal, feed = Hurries(), PartFeed()
    feed.attach([journal], shards=[0])
    first = await started(feed)
    # Nobody waits.
    feed.due()
    assert journal.count == 0
    # Who comes then finds it written.
    task = await waiting(feed, first)
    assert journal.count == 1
    feed.due()
    assert journal.count == 2
    feed.written("a-1", b"1\n")
    answer = await task
    task = await waiting(feed, answer)
    assert journal.count == 2
    feed.end()
    assert (await task).ended


async def test_who_is_of_another_process_or_too_far_behind_is_told_to_read_the_journals() -> None:
    feed = PartFeed(window_bytes=10, answer_bytes=8)
    first = await started(feed)
    for number in range(5):
        feed.written(f"a-{number}", b"12345\n")
    for epoch, place in ((first.epoch, first.next), (first.epoch, 6), (first.epoch, -1), ("other", 5)):
        answer = await feed.after(epoch, place, 60.0)
        assert (answer.gap, answer.next, answer.parts) == (True, 5, [])
    answer = await feed.after(first.epoch, 4, 60.0)
    assert (answer.gap, [part.file for part in answer.parts]) == (False, ["a-4"])
    # A large part is not kept, and nothing before it; also for one who waits.
    task = await waiting(feed, answer)
    feed.written("a-5", b"12345678\n")
    assert (await task).gap
    assert (await task).next == 6
    assert not feed._parts
    assert feed._size == 0


@given(sizes=st.lists(st.integers(1, 30), max_size=40), looks=st.lists(st.booleans(), min_size=40, max_size=40))
def test_who_follows_has_every_part_once_or_is_told_and_memory_is_bounded(sizes: list[int], looks: list[bool]) -> None:
    async def play() -> None:
        feed = PartFeed(window_bytes=50, answer_bytes=20)
        answer = await started(feed)
        had: list[int] = []
        for number, size in enumerate(sizes):
            feed.written(str(number), b"x" * size)
            assert feed._size == sum(len(part.lines) for part in feed._parts) <= 50
            while looks[number]:
                answer = await feed.after(answer.epoch, answer.next, 0.0)
                assert sum(len(part.lines) for part in answer.parts) <= 20
                if answer.gap:
                    # The journals have them.
                    had = list(range(answer.next))
                elif not answer.parts:
                    break
                had += [int(part.file) for part in answer.parts]
            if looks[number]:
                assert had == list(range(number + 1))

    asyncio.run(play())
