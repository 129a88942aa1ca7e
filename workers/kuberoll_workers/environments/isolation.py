"""Executors of environments: the event loop, a thread of the worker, or child processes (`processes`)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from kuberoll_workers.data.plain import own_copy
from kuberoll_workers.environments.interface import ChatMessage, Metadata
from kuberoll_workers.environments.outcome import Outcomes, StepTimedOut, fault_of, split_return
from kuberoll_workers.environments.processes import ProcessExecutor
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.sandbox import Sandbox

Logs = list[list[ChatMessage]]
EnvironmentFactory = Callable[[], Any]

MAX_ABANDONED_THREADS = 16
"""Limit of threads that hung steps may block permanently: threads cannot be killed."""


class StepExecutor(Protocol):
    """Runs batched steps of one environment without blocking the event loop."""

    @property
    def parallel(self) -> int | None:
        """Number of steps worth running concurrently; None for no limit."""
        ...

    async def step(self, logs: Logs, metadata: list[Metadata]) -> Outcomes:
        """Run one batched step, validate its result and split it by trajectory.

        Raises:
            StepRaised, StepTimedOut, StepInvalid: The environment's fault.
            RowFault: The environment reported an unusable dataset row.
        """
        ...

    async def close(self) -> None:
        """Release all threads and processes."""
        ...


class CoroutineExecutor:
    """Runs an environment whose `step` is a coroutine function on the event loop, any number of steps concurrently."""

    parallel = None

    def __init__(self, environment: Any, *, timeout: float, any_metadata: bool = False) -> None:
        self._environment = environment
        self._timeout = timeout
        self._any_metadata = any_metadata
        self._steps: set[asyncio.Task[Outcomes]] = set()

    async def step(self, logs: Logs, metadata: list[Metadata]) -> Outcomes:
        # A separate task: code that ignores cancellation keeps its task, and nothing waits for it.
        step = asyncio.create_task(self._step(logs, metadata))
        self._steps.add(step)
        step.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.shield(step)
        except TimeoutError as error:
            raise StepTimedOut(timeout_message(self._timeout)) from error
        finally:
            step.cancel()

    def _ended(self, step: asyncio.Task[Outcomes]) -> None:
        self._steps.discard(step)
        if not step.cancelled():
            # Retrieved, so that asyncio does not log it as never retrieved.
            step.exception()

    async def _step(self, logs: Logs, metadata: list[Metadata]) -> Outcomes:
        try:
            returned = await self._environment.step(logs, copy_states(metadata, self._any_metadata))
            return split_return(returned, len(logs), any_metadata=self._any_metadata)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise fault_of(error) from error
        except BaseException as error:
            # The environment's own TimeoutError is not our time limit, and its sys.exit() must not end the program.
            raise fault_of(error) from error

    async def close(self) -> None:
        return None


class InlineExecutor:
    """Runs a plain environment in one daemon thread; a hung step costs that thread, not the run."""

    parallel = 1

    def __init__(self, environment: Any, *, timeout: float, any_metadata: bool = False) -> None:
        self._environment = environment
        self._timeout = timeout
        self._any_metadata = any_metadata
        self._abandoned = 0
        self._thread: DaemonThread | None = None

    async def step(self, logs: Logs, metadata: list[Metadata]) -> Outcomes:
        if self._abandoned >= MAX_ABANDONED_THREADS:
            raise StepTimedOut(
                f"{self._abandoned} steps of this environment hung and block their threads forever; "
                "set isolation: Process, where a hung step is killed"
            )
        if self._thread is None:
            self._thread = DaemonThread()
        future = self._thread.submit(lambda: self._step(logs, metadata))
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            self._thread.abandon()
            self._thread = None
            self._abandoned += 1
            raise StepTimedOut(timeout_message(self._timeout)) from error

    def _step(self, logs: Logs, metadata: list[Metadata]) -> Outcomes:
        # Validation and error messages run code of the environment's objects, which may hang like the step itself, so
        # they run
        # in this thread, too. StopIteration and CancelledError have a special meaning to a future.
        try:
            returned = self._environment.step(logs, copy_states(metadata, self._any_metadata))
            return split_return(returned, len(logs), any_metadata=self._any_metadata)
        except BaseException as error:
            raise fault_of(error) from error

    async def close(self) -> None:
        if self._thread is not None:
            self._thread.abandon()
            self._thread = None


def make_executor(
    factory: EnvironmentFactory,
    *,
    isolation: str,
    processes: int,
    timeout: float,
    spare: int = 0,
    sandbox: Sandbox | None = None,
) -> StepExecutor:
    """Create the executor of an environment.

    Args:
        factory: Creates the environment; a `registry.PlainSpec` for isolation Process.
        isolation: `Inline` or `Process`.
        processes: Maximum number of child processes, with `Process`.
        timeout: Time limit of one step, in seconds.
        spare: Maximum number of further child processes while steps take unusually long.
        sandbox: Files and variables of child processes; None for the defaults.
    """
    if isolation == "Process":
        if not isinstance(factory, PlainSpec):
            raise TypeError("isolation Process: the environment must be given as a registry.PlainSpec")
        return ProcessExecutor(factory, processes=processes, timeout=timeout, spare=spare, sandbox=sandbox)
    environment = factory()
    if inspect.iscoroutinefunction(environment.step):
        return CoroutineExecutor(environment, timeout=timeout)
    return InlineExecutor(environment, timeout=timeout)


class DaemonThread:
    """A thread that runs calls in order and, unlike an executor's, does not keep the interpreter alive."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="kuberoll-environment", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put((call, future))
        return future

    def abandon(self) -> None:
        """Let the thread end after its current call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except Exception as error:
                # A future would treat a StopIteration as the end of a generator.
                future.set_exception(fault_of(error) if isinstance(error, StopIteration) else error)
            except BaseException as error:
                # sys.exit() in the environment's code ends the call, not the program.
                future.set_exception(fault_of(error))
            else:
                future.set_result(result)


def copy_states(metadata: list[Metadata], any_metadata: bool) -> list[Metadata]:
    """Copies of episode states: changes in place by the environment must not reach the trajectory's own state."""
    return metadata if any_metadata else [None if state is None else own_copy(state) for state in metadata]


def is_cancelled() -> bool:
    """True if the current task is being cancelled, False if foreign code raised CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def timeout_message(timeout: float) -> str:
    """Message for a step that exceeded its time limit."""
    return f"step took longer than stepTimeoutSeconds ({timeout:g} s)"
