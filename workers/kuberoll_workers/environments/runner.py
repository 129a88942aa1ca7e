"""Runner: takes steps of single trajectories from the loop, and sends them to the environment in batches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from kuberoll_workers.environments.interface import ChatMessage, Metadata
from kuberoll_workers.environments.isolation import StepExecutor
from kuberoll_workers.environments.outcome import EnvironmentFault, Outcomes, StepOutcome, StepTimedOut
from kuberoll_workers.environments.processes import ProcessExecutor

PATIENCE_SECONDS = 1.0
"""Minimum duration of a call before others stop waiting for it."""
_PATIENCE_FACTOR = 4.0
"""Patience in multiples of the longest call that returned."""
_FIRST_PATIENCE = 0.25
"""Patience with the first call, which may load a model, as a fraction of the time limit."""


class _Waiting:
    __slots__ = ("future", "log", "metadata")

    def __init__(self, log: list[ChatMessage], metadata: Metadata) -> None:
        self.log = log
        self.metadata = metadata
        self.future: asyncio.Future[StepOutcome] = asyncio.get_running_loop().create_future()


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


class EnvironmentRunner:
    """Interface of one environment to the loop.

    All steps that wait when the environment becomes free go into one `step` call: no time is lost waiting for a full
        batch,
    and a busy environment gets large ones. A call costs a thread or process switch, whatever the size of the batch.

    Where the executor has spare processes, a step that hangs does not hold up others. A call that takes unusually long
    keeps its process, and the steps that wait go to a spare one. When a call has timed out, nobody knows which of its
    trajectories hangs, so each is stepped alone in spare processes: first for a short time only, so that those that do
    not hang return before those that do are given the full time.
    """

    def __init__(self, executor: StepExecutor, *, max_batch: int) -> None:
        self._executor = executor
        self._spares = executor if isinstance(executor, ProcessExecutor) and executor.spare else None
        self._max_batch = max_batch
        self._waiting: deque[_Waiting] = deque()
        # Trajectories of calls that failed, which are stepped alone to find out which of them is at fault.
        self._alone: deque[_Waiting] = deque()
        # Trajectories of calls that timed out, and those that took long when they were stepped alone.
        self._suspects: deque[_Waiting] = deque()
        self._hanging: deque[_Waiting] = deque()
        self._running: dict[asyncio.Task[None], _Call] = {}
        self._longest = 0.0
        self._scheduled = False

    async def step(self, log: list[ChatMessage], metadata: Metadata, *, hung: bool = False) -> StepOutcome:
        """Step one trajectory.

        Args:
            hung: True if the same step timed out before.

        Raises:
            EnvironmentFault: This trajectory could not be stepped. Faults of other trajectories in the same batch never
                appear here.
        """
        waiting = _Waiting(log, metadata)
        (self._hanging if hung and self._spares else self._waiting).append(waiting)
        self._schedule()
        return await waiting.future

    async def step_batch(
        self, logs: Sequence[list[ChatMessage]], metadata: Sequence[Metadata]
    ) -> list[StepOutcome | BaseException]:
        """Step several trajectories; the result of a failed one is its fault."""
        steps = (self.step(log, state) for log, state in zip(logs, metadata, strict=True))
        return await asyncio.gather(*steps, return_exceptions=True)

    async def close(self) -> None:
        """Stop the environment; waiting steps are cancelled."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for queue in (self._waiting, self._alone, self._suspects, self._hanging):
            for waiting in queue:
                waiting.future.cancel()
            queue.clear()
        await self._executor.close()

    def _schedule(self) -> None:
        # Deferred to the end of this iteration of the event loop, so that steps requested together share a batch.
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        self._release_overdue()
        parallel = self._executor.parallel
        while (self._alone or self._waiting) and (parallel is None or self._holding() < parallel):
            # With a coroutine environment, no episode needs to wait for another.
            size = 1
            if parallel is not None and not self._alone:
                size = min(self._max_batch, -(-len(self._waiting) // parallel))
            if batch := _taken(self._alone or self._waiting, size):
                self._start(_Call(batch))
        if self._spares is not None:
            self._dispatch_suspects(self._spares)

    def _dispatch_suspects(self, spares: ProcessExecutor) -> None:
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

    def _patience(self, spares: ProcessExecutor) -> float:
        usual = _PATIENCE_FACTOR * self._longest if self._longest else _FIRST_PATIENCE * spares.timeout
        return min(spares.timeout, max(PATIENCE_SECONDS, usual))

    async def _run(self, call: _Call) -> None:
        batch = call.batch
        try:
            outcomes = await self._step(call)
        except StepTimedOut as fault:
            if self._spares is not None and len(batch) > 1:
                self._suspects.extend(batch)
                return
            if self._spares is not None and call.limit is not None and call.limit < self._spares.timeout:
                self._hanging.extend(batch)
                return
            outcomes = Outcomes([fault] * len(batch), answered=False)
        except EnvironmentFault as fault:
            outcomes = Outcomes([fault] * len(batch), answered=False)
        except BaseException as error:
            for waiting in batch:
                _fail(waiting, error)
            raise
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if not isinstance(outcome, EnvironmentFault):
                if not waiting.future.done():
                    waiting.future.set_result(outcome)
            elif len(batch) == 1:
                _fail(waiting, outcome)
            else:
                # One bad episode may fail a whole call.
                self._alone.append(waiting)

    async def _step(self, call: _Call) -> Outcomes:
        logs, metadata = [waiting.log for waiting in call.batch], [waiting.metadata for waiting in call.batch]
        if self._spares is None:
            return await self._executor.step(logs, metadata)
        began: float | None = None

        def begin() -> None:
            nonlocal began
            began = time.perf_counter()
            assert self._spares is not None
            patience = self._patience(self._spares)
            call.timer = asyncio.get_running_loop().call_later(patience, self._overdue, call)

        try:
            outcomes = await self._spares.step(logs, metadata, limit=call.limit, began=begin)
        finally:
            if call.timer is not None:
                call.timer.cancel()
            call.overdue = call.stalled = False
        if began is not None:
            self._longest = max(self._longest, time.perf_counter() - began)
        return outcomes

    def _overdue(self, call: _Call) -> None:
        call.overdue = True
        self._schedule()


def _taken(queue: deque[_Waiting], count: int) -> list[_Waiting]:
    """The first steps of a queue that somebody still waits for, at most `count`."""
    batch: list[_Waiting] = []
    while queue and len(batch) < count:
        waiting = queue.popleft()
        if not waiting.future.done():
            batch.append(waiting)
    return batch


def _fail(waiting: _Waiting, error: BaseException) -> None:
    if waiting.future.done():
        return
    if isinstance(error, asyncio.CancelledError):
        waiting.future.cancel()
    else:
        waiting.future.set_exception(error)
