"""Runner: takes steps of single trajectories from the loop, and sends them to the environment in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from kuberoll_workers.environments.interface import ChatMessage, Metadata
from kuberoll_workers.environments.isolation import StepExecutor
from kuberoll_workers.environments.outcome import EnvironmentFault, Outcomes, StepOutcome


class _Waiting:
    __slots__ = ("future", "log", "metadata")

    def __init__(self, log: list[ChatMessage], metadata: Metadata) -> None:
        self.log = log
        self.metadata = metadata
        self.future: asyncio.Future[StepOutcome] = asyncio.get_running_loop().create_future()


class EnvironmentRunner:
    """Interface of one environment to the loop.

    All steps that wait when the environment becomes free go into one `step` call: no time is lost waiting for a full
        batch,
    and a busy environment gets large ones. A call costs a thread or process switch, whatever the size of the batch.
    """

    def __init__(self, executor: StepExecutor, *, max_batch: int) -> None:
        self._executor = executor
        self._max_batch = max_batch
        self._waiting: deque[_Waiting] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._scheduled = False

    async def step(self, log: list[ChatMessage], metadata: Metadata) -> StepOutcome:
        """Step one trajectory.

        Raises:
            EnvironmentFault: This trajectory could not be stepped. Faults of other trajectories in the same batch never
                appear here.
        """
        waiting = _Waiting(log, metadata)
        self._waiting.append(waiting)
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
        for waiting in self._waiting:
            waiting.future.cancel()
        self._waiting.clear()
        await self._executor.close()

    def _schedule(self) -> None:
        # Deferred to the end of this iteration of the event loop, so that steps requested together share a batch.
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        parallel = self._executor.parallel
        while self._waiting and (parallel is None or len(self._running) < parallel):
            batch: list[_Waiting] = []
            # With a coroutine environment, no episode needs to wait for another.
            size = 1 if parallel is None else min(self._max_batch, -(-len(self._waiting) // parallel))
            while self._waiting and len(batch) < size:
                waiting = self._waiting.popleft()
                if not waiting.future.done():
                    batch.append(waiting)
            if batch:
                task = asyncio.create_task(self._run(batch))
                self._running.add(task)
                task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.result()
        if self._waiting:
            self._schedule()

    async def _run(self, batch: list[_Waiting]) -> None:
        try:
            outcomes = await self._executor.step(
                [waiting.log for waiting in batch], [waiting.metadata for waiting in batch]
            )
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
                # One bad episode may fail a whole call: stepping each alone shows which it is.
                await self._run([waiting])


def _fail(waiting: _Waiting, error: BaseException) -> None:
    if waiting.future.done():
        return
    if isinstance(error, asyncio.CancelledError):
        waiting.future.cancel()
    else:
        waiting.future.set_exception(error)
