"""Rollouts as streams: finished trajectories, or finished prompt groups, one by one as they complete.

    async with stream_groups(rollout, groups) as stream:
        async for group in stream:
            train_on(group.kept)
    carry_over = stream.partials

Nothing here starts an event loop. Leaving the `async with` stops whatever is in flight: its requests are aborted at
the engine, its complete turns are in `partials`, and a sample that is given one of them (`Sample.partial`) goes on
after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from kuberoll_workers.data.prompts import Sample, SampleGroup
from kuberoll_workers.data.record import FailureRecord, Partial, TrajectoryRecord
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.rollouts.drop_report import DropReport
from kuberoll_workers.rollouts.groups import GroupPolicy, GroupResult, Result
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.scheduling import run_groups, run_rollout

_Item = TypeVar("_Item")


class _End:
    """Stands in the buffer after the last item."""


class RolloutStream(Generic[_Item]):
    """What a rollout yields, in the order in which it completes; read it with `async for`, inside its `async with`.

    Attributes:
        tail: Kept against dropped trajectories so far.
        partials: After the `async with`: the complete turns of what was in flight, and of what waited for its group.
        unread: After the `async with`: items that were complete but not read.
    """

    def __init__(self, buffer: int) -> None:
        self.tail = DropReport()
        self.partials: list[Partial] = []
        self.unread: list[_Item] = []
        self.drain_event = Drain()
        self._buffer: asyncio.Queue[_Item | _End] = asyncio.Queue(buffer)
        self._error: Exception | None = None
        self._over = False

    def __aiter__(self) -> AsyncIterator[_Item]:
        return self

    async def __anext__(self) -> _Item:
        if not self._over:
            item = await self._buffer.get()
            if not isinstance(item, _End):
                return item
            self._over = True
            if self._error is not None:
                raise self._error
        raise StopAsyncIteration

    def drain(self) -> None:
        """Begin nothing more; the stream ends when what is in flight has ended."""
        self.drain_event.set()

    async def put(self, item: _Item) -> None:
        """Hand one item to the reader; waits while the buffer is full, with its place in the rollout taken."""
        await self._buffer.put(item)

    @asynccontextmanager
    async def feed(self, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Do the work that puts the items while the body runs; stopped with it."""
        task = asyncio.create_task(self._run(work))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))
            # A task that was stopped before its first step has not begun the work.
            work.close()
            self._over = True
            while not self._buffer.empty():
                item = self._buffer.get_nowait()
                if not isinstance(item, _End):
                    self.unread.append(item)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._error = error
        await self._buffer.put(_End())


@asynccontextmanager
async def stream_trajectories(
    rollout: Rollout, samples: Iterable[Sample] | AsyncIterable[Sample], *, buffer: int | None = None
) -> AsyncIterator[RolloutStream[TrajectoryRecord | FailureRecord]]:
    """Run samples, each for itself; yields each as it ends, finished or given up.

    At most `concurrency` trajectories are in flight and `buffer` results wait to be read (None: as many as in
    flight): a reader that is slow slows the rollout down instead of filling the memory.

    Args:
        samples: Taken one by one; an endless source is fine.

    Raises:
        Exception: To the reader, what `samples` raised, or KeyError for a task name without an environment.
    """
    size = rollout.settings.concurrency if buffer is None else buffer
    stream: RolloutStream[TrajectoryRecord | FailureRecord] = RolloutStream(size)

    async def sink(result: TrajectoryRecord | FailureRecord) -> None:
        stream.tail.add(result)
        await stream.put(result)

    work = run_rollout(rollout, samples, sink, stream.drain_event, interrupted=stream.partials.append)
    async with stream.feed(work):
        yield stream


@asynccontextmanager
async def stream_groups(
    rollout: Rollout,
    groups: Iterable[SampleGroup] | AsyncIterable[SampleGroup],
    *,
    policy: GroupPolicy | None = None,
    buffer: int | None = None,
) -> AsyncIterator[RolloutStream[GroupResult]]:
    """Run prompt groups; yields each when it is complete, or cannot be completed any more.

    A group that the policy's filter dropped is yielded too, with nothing in `kept`. Concurrency and buffer are those
    of `stream_trajectories`, the buffer counting groups.

    Args:
        groups: Taken one by one; an endless source is fine.
        policy: Oversampled groups need none: a group is complete with its `keep` first finishers.

    Raises:
        Exception: To the reader, what `groups` raised, or KeyError for a task name without an environment.
    """
    size = rollout.settings.concurrency if buffer is None else buffer
    stream: RolloutStream[GroupResult] = RolloutStream(size)

    async def sink(result: Result) -> None:
        stream.tail.add(result)

    work = run_groups(
        rollout,
        groups,
        sink,
        policy=policy,
        drain=stream.drain_event,
        group_sink=stream.put,
        interrupted=stream.partials.append,
    )
    async with stream.feed(work):
        yield stream
