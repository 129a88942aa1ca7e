"""Rollouts as streams: finished trajectories, or finished prompt groups, one by one as they complete.

    async with stream_groups(rollout, groups) as stream:
        async for group in stream:
            train_on(group.kept)
    carry_over = stream.partials

Nothing here starts an event loop. Leaving the `async with` stops all trajectories in flight: their requests are aborted
at the engine, and their complete turns are in `partials`. A sample with one of these as `Sample.partial` resumes after
it.
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
from kuberoll_workers.rollouts.run_ahead import RunAhead
from kuberoll_workers.rollouts.scheduling import run_groups, run_rollout

_Item = TypeVar("_Item")


class _End:
    """Marks the end of the buffer."""


class RolloutStream(Generic[_Item]):
    """Results of a rollout in the order in which they complete; read it with `async for`, inside its `async with`.

    Attributes:
        tail: Comparison of kept and dropped trajectories so far.
        partials: After the `async with`: complete turns of trajectories that were in flight or waited for their group.
        unread: After the `async with`: results that were complete but not read.
        run_ahead: Number of trajectories that were started and not read, and its limit.
    """

    def __init__(self, limit: int) -> None:
        """`limit` is the maximum number of trajectories that have been started and not read."""
        self.tail = DropReport()
        self.partials: list[Partial] = []
        self.unread: list[_Item] = []
        self.drain_event = Drain()
        self.run_ahead = RunAhead(limit)
        # Bounded by `run_ahead`.
        self._buffer: asyncio.Queue[_Item | _End] = asyncio.Queue()
        self._error: Exception | None = None
        self._over = False

    def __aiter__(self) -> AsyncIterator[_Item]:
        return self

    async def __anext__(self) -> _Item:
        if not self._over:
            item = await self._buffer.get()
            if not isinstance(item, _End):
                self.run_ahead.read(_trajectories(item))
                return item
            self._over = True
            if self._error is not None:
                raise self._error
        raise StopAsyncIteration

    def drain(self) -> None:
        """Start no more trajectories; the stream ends when those in flight have ended."""
        self.drain_event.set()

    async def put(self, item: _Item) -> None:
        """Pass one item to the reader."""
        self._buffer.put_nowait(item)

    @asynccontextmanager
    async def feed(self, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Run the coroutine that puts the items while the body runs; it is cancelled when the body ends."""
        task = asyncio.create_task(self._run(work))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))
            # A task that is cancelled before its first step never awaits the coroutine.
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
        self._buffer.put_nowait(_End())


def _trajectories(item: Any) -> int:
    """Number of trajectories whose results an item contains."""
    return len(item.kept) + len(item.failed) + len(item.dropped) if isinstance(item, GroupResult) else 1


def _limit(rollout: Rollout, buffer: int | None) -> int:
    concurrency = rollout.settings.concurrency
    return concurrency + (concurrency if buffer is None else buffer)


@asynccontextmanager
async def stream_trajectories(
    rollout: Rollout, samples: Iterable[Sample] | AsyncIterable[Sample], *, buffer: int | None = None
) -> AsyncIterator[RolloutStream[TrajectoryRecord | FailureRecord]]:
    """Run samples independently; yields each result as its trajectory finishes or fails permanently.

    At most `concurrency` trajectories are in flight, and at most `concurrency + buffer` are in flight or wait to be
    read: a slow reader slows the rollout down instead of filling the memory.

    Args:
        samples: Taken one by one; may be endless.
        buffer: Number of trajectories, 0 or more; None: `concurrency`.

    Raises:
        Exception: Raised to the reader: what `samples` raised, or KeyError for a task name without an environment.
    """
    stream: RolloutStream[TrajectoryRecord | FailureRecord] = RolloutStream(_limit(rollout, buffer))

    async def sink(result: TrajectoryRecord | FailureRecord) -> None:
        stream.tail.add(result)
        await stream.put(result)

    work = run_rollout(
        rollout,
        samples,
        sink,
        stream.drain_event,
        interrupted=stream.partials.append,
        run_ahead=stream.run_ahead,
    )
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
    """Run prompt groups; yields each when it is complete or can no longer be completed.

    A group that the policy's filter dropped is yielded too, with an empty `kept`.

    At most `concurrency` trajectories are in flight, and at most `concurrency + buffer` are in flight, wait for their
    group, or wait with it to be read. A group with more samples than that is run when all groups before it have been
    read. The samples that an atomic group fails without starting them exceed the bound, by less than one group.

    Args:
        groups: Taken one by one; may be endless.
        buffer: Number of trajectories, 0 or more; None: `concurrency`. With a small one, finished trajectories that
            wait for their group keep others from being started.
        policy: Not needed for oversampling: a group is complete with its first `keep` finished trajectories.

    Raises:
        Exception: Raised to the reader: what `groups` raised, or KeyError for a task name without an environment.
    """
    stream: RolloutStream[GroupResult] = RolloutStream(_limit(rollout, buffer))

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
        run_ahead=stream.run_ahead,
    )
    async with stream.feed(work):
        yield stream
