"""Batcher: collects calls for single episodes, and sends them to the environment in batches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from kuberoll_workers.environments.batches import AnyBatch, PreparingBatch, ResetBatch
from kuberoll_workers.environments.executor import Executor, SparingExecutor
from kuberoll_workers.environments.outcome import EnvironmentFault, EpisodeLost, StepTimedOut

PATIENCE_SECONDS = 1.0
"""Minimum duration of a call before others stop waiting for it."""
_PATIENCE_FACTOR = 4.0
"""Patience in multiples of the longest call that returned."""
_FIRST_PATIENCE = 0.25
"""Patience with the first call, which may load a model, as a fraction of the time limit."""


_SHARE_OF_LIMIT = 0.5
"""Part of the time limit that a call for several episodes is planned to take."""
_LEARNING = 0.2


class _Waiting:
    """A call for one episode, which waits for its result."""

    __slots__ = ("future", "item", "kind")

    def __init__(self, kind: type[AnyBatch | PreparingBatch], item: Any) -> None:
        self.kind = kind
        self.item = item
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class _Call:
    """One call of the environment.

    Attributes:
        spare: True if it has a spare process.
        limit: Time limit in seconds if it is not the environment's own.
        overdue: True if it takes unusually long.
        stalled: True if others do not wait for it: while it takes unusually long and a spare process is free.
    """

    __slots__ = ("batch", "limit", "overdue", "spare", "stalled", "timer")

    def __init__(self, batch: list[_Waiting], *, spare: bool = False, limit: float | None = None) -> None:
        self.batch = batch
        self.spare = spare
        self.limit = limit
        self.overdue = self.stalled = False
        self.timer: asyncio.TimerHandle | None = None


class Batcher:
    """Calls of one environment in batches.

    All calls of a method that wait when the environment becomes free go into one: no time is lost waiting for a full
    batch, and a busy environment gets large ones. A call costs a thread or process switch, whatever the size of the
    batch.

    Where the executor has spare processes, a call that hangs does not hold up others. One that takes unusually long
    keeps its process, and those that wait go to a spare one. When a call has timed out, nobody knows which of its
    episodes hangs, so each is called alone in spare processes: first for a short time only, so that those that do
    not hang return before those that do are given the full time.
    """

    def __init__(self, executor: Executor, *, max_batch: int) -> None:
        self._executor = executor
        self._spares = executor if isinstance(executor, SparingExecutor) and executor.spare else None
        self._max_batch = max_batch
        self._waiting: deque[_Waiting] = deque()
        # Episodes of calls that failed, which are called alone to find out which of them is at fault.
        self._alone: deque[_Waiting] = deque()
        # Episodes of calls that timed out, and those that took long when they were called alone.
        self._suspects: deque[_Waiting] = deque()
        self._hanging: deque[_Waiting] = deque()
        self._running: dict[asyncio.Task[None], _Call] = {}
        self._longest = 0.0
        # Usual duration of a call for each of its episodes, in seconds; 0: unknown.
        self._each = 0.0
        self._returned = False
        self._scheduled = False

    async def call(self, kind: type[AnyBatch], item: Any, *, alone: bool = False, hung: bool = False) -> Any:
        """Call the environment for one episode.

        Args:
            kind: The call's batches.
            item: The episode's part of them.
            alone: In a batch of its own.
            hung: True if the same call timed out before.

        Raises:
            EnvironmentFault: The call failed for this episode. Faults of other episodes in the same batch never appear
                here, except with `reset`, which is not called again for them.
        """
        waiting = _Waiting(kind, item)
        (self._hanging if hung and self._spares else self._alone if alone else self._waiting).append(waiting)
        self._schedule()
        return await waiting.future

    def post(self, kind: type[PreparingBatch], item: Any) -> asyncio.Future[Any]:
        """Call the environment for one episode, before all calls that follow this one; its future has the result."""
        waiting = _Waiting(kind, item)
        self._waiting.append(waiting)
        self._schedule()
        return waiting.future

    async def close(self) -> None:
        """Stop the environment; waiting calls are cancelled."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for queue in (self._waiting, self._alone, self._suspects, self._hanging):
            for waiting in queue:
                waiting.future.cancel()
            queue.clear()
        await self._executor.close()

    def _schedule(self) -> None:
        # Deferred to the end of this iteration of the event loop, so that calls requested together share a batch.
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        self._release_overdue()
        parallel = self._executor.parallel
        while (self._alone or self._waiting) and (parallel is None or self._holding() < parallel):
            size = 1
            if self._executor.batched and parallel is not None and not self._alone:
                size = min(self._largest(), -(-len(self._waiting) // parallel))
            if batch := _taken(self._alone or self._waiting, size):
                self._start(_Call(batch))
        if self._spares is not None:
            self._dispatch_suspects(self._spares)

    def _largest(self) -> int:
        """Number of episodes in one call that it has ample time for."""
        if self._each <= 0.0:
            return self._max_batch
        return max(1, min(self._max_batch, int(_SHARE_OF_LIMIT * self._executor.timeout / self._each)))

    def _dispatch_suspects(self, spares: SparingExecutor) -> None:
        while self._suspects and self._spares_used() < spares.spare:
            if batch := _taken(self._suspects, 1):
                self._start(_Call(batch, spare=True, limit=self._patience(spares)))
        if any(call.limit is not None for call in self._running.values()):
            return
        # One spare process is left for those who wait behind a call of the usual processes.
        while self._hanging and self._spares_used() < max(1, spares.spare - 1):
            if batch := _taken(self._hanging, 1):
                self._start(_Call(batch, spare=True))
        if not (self._spares_used() or self._suspects or self._hanging):
            spares.end_spares()

    def _start(self, call: _Call) -> None:
        task = asyncio.create_task(self._run(call))
        self._running[task] = call
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled():
            task.result()
        self._schedule()

    def _holding(self) -> int:
        """Number of calls that others wait for."""
        return sum(not (call.spare or call.stalled) for call in self._running.values())

    def _spares_used(self) -> int:
        return sum(call.spare or call.stalled for call in self._running.values())

    def _release_overdue(self) -> None:
        """Let others stop waiting for calls that take unusually long, as far as there are spare processes."""
        for call in self._running.values():
            if call.overdue and not (call.spare or call.stalled):
                assert self._spares is not None
                call.stalled = self._spares_used() < self._spares.spare

    def _patience(self, spares: SparingExecutor) -> float:
        usual = _PATIENCE_FACTOR * self._longest if self._longest else _FIRST_PATIENCE * spares.timeout
        return min(spares.timeout, max(PATIENCE_SECONDS, usual))

    async def _run(self, call: _Call) -> None:
        batch = call.batch
        outcomes: Sequence[Any]
        try:
            outcomes = await self._outcomes(call)
        except StepTimedOut as fault:
            if self._spares is not None and len(batch) > 1 and batch[0].kind is not ResetBatch:
                self._suspects.extend(batch)
                return
            if self._spares is not None and call.limit is not None and call.limit < self._spares.timeout:
                self._hanging.extend(batch)
                return
            outcomes = [fault] * len(batch)
        except EnvironmentFault as fault:
            outcomes = [fault] * len(batch)
        except BaseException as error:
            for waiting in batch:
                _fail(waiting, error)
            raise
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if not isinstance(outcome, EnvironmentFault):
                if not waiting.future.done():
                    waiting.future.set_result(outcome)
            elif len(batch) == 1 or waiting.kind is ResetBatch or isinstance(outcome, EpisodeLost):
                _fail(waiting, outcome)
            else:
                # One bad episode may fail a whole call.
                self._alone.append(waiting)

    async def _outcomes(self, call: _Call) -> Sequence[Any]:
        arguments: Any = call.batch[0].kind.of([waiting.item for waiting in call.batch])
        began: float | None = None
        if self._spares is None:
            began = time.perf_counter()
            outcomes = await self._executor.run(arguments)
            self._note(time.perf_counter() - began, len(call.batch))
            return outcomes

        def begin() -> None:
            nonlocal began
            began = time.perf_counter()
            assert self._spares is not None
            patience = self._patience(self._spares)
            call.timer = asyncio.get_running_loop().call_later(patience, self._overdue, call)

        try:
            outcomes = await self._spares.run(arguments, limit=call.limit, began=begin)
        finally:
            if call.timer is not None:
                call.timer.cancel()
            call.overdue = call.stalled = False
        if began is not None:
            seconds = time.perf_counter() - began
            self._longest = max(self._longest, seconds)
            self._note(seconds, len(call.batch))
        return outcomes

    def _note(self, seconds: float, size: int) -> None:
        if not self._returned:
            # The first one may load a model.
            self._returned = True
            return
        each = seconds / size
        # Small calls cost more for each of their episodes, which says nothing of large ones.
        rises = 0.0 < self._each < each
        self._each = self._each + _LEARNING * (each - self._each) if rises else each

    def _overdue(self, call: _Call) -> None:
        call.overdue = True
        self._schedule()


def _taken(queue: deque[_Waiting], count: int) -> list[_Waiting]:
    """Calls that somebody still waits for: the first of the queue, and others that share its call, at most `count`."""
    batch: list[_Waiting] = []
    others: list[_Waiting] = []
    while queue and len(batch) < count:
        waiting = queue.popleft()
        if waiting.future.done():
            continue
        if batch and waiting.kind is not batch[0].kind:
            others.append(waiting)
        else:
            batch.append(waiting)
            if not waiting.kind.shared:
                break
    queue.extendleft(reversed(others))
    return batch


def _fail(waiting: _Waiting, error: BaseException) -> None:
    if waiting.future.done():
        return
    if isinstance(error, asyncio.CancelledError):
        waiting.future.cancel()
    else:
        waiting.future.set_exception(error)
