"""Where an environment's code runs: a thread of the worker, or child processes that can be killed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kuberoll_workers.environments.interface import ChatMessage, Metadata, UnusableRow
from kuberoll_workers.environments.outcome import EnvironmentFault, RowFault, StepRaised, StepTimedOut

if TYPE_CHECKING:
    from pebble import ProcessPool

Logs = list[list[ChatMessage]]
EnvironmentFactory = Callable[[], Any]

MAX_ABANDONED_THREADS = 16
"""A thread cannot be killed. After so many hung steps the environment is given up instead of leaking one more."""


class StepExecutor(Protocol):
    """Runs batched steps of one environment, off the event loop."""

    @property
    def parallel(self) -> int | None:
        """Steps worth running at once; None: as many as there are."""
        ...

    async def step(self, logs: Logs, metadata: list[Metadata]) -> Any:
        """Run one batched step and return what the environment returned, unchecked.

        Raises:
            StepRaised, StepTimedOut: The environment's fault.
            RowFault: The environment said that the dataset's row is at fault.
        """
        ...

    async def close(self) -> None:
        """Stop what was started."""
        ...


class CoroutineExecutor:
    """An environment whose `step` is a coroutine function runs on the event loop, any number of steps at once."""

    parallel = None

    def __init__(self, environment: Any, *, timeout: float) -> None:
        self._environment = environment
        self._timeout = timeout

    async def step(self, logs: Logs, metadata: list[Metadata]) -> Any:
        timeout = asyncio.timeout(self._timeout)
        try:
            async with timeout:
                return await self._environment.step(logs, metadata)
        except Exception as error:
            # The environment's own TimeoutError is not the time limit.
            raise (StepTimedOut(timed_out(self._timeout)) if timeout.expired() else fault_of(error)) from error

    async def close(self) -> None:
        return None


class InlineExecutor:
    """A plain environment runs in one daemon thread; a hung step costs that thread, not the run."""

    parallel = 1

    def __init__(self, environment: Any, *, timeout: float) -> None:
        self._environment = environment
        self._timeout = timeout
        self._abandoned = 0
        self._thread: DaemonThread | None = None

    async def step(self, logs: Logs, metadata: list[Metadata]) -> Any:
        if self._abandoned >= MAX_ABANDONED_THREADS:
            raise StepTimedOut(
                f"{self._abandoned} steps of this environment hung and hold their threads for ever; "
                "set isolation: Process, where a hung step is killed"
            )
        if self._thread is None:
            self._thread = DaemonThread()
        future = self._thread.submit(lambda: self._environment.step(logs, metadata))
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            if future.done() and not future.cancelled():
                raise fault_of(error) from error
            self._thread.abandon()
            self._thread = None
            self._abandoned += 1
            raise StepTimedOut(timed_out(self._timeout)) from error
        except Exception as error:
            raise fault_of(error) from error

    async def close(self) -> None:
        if self._thread is not None:
            self._thread.abandon()
            self._thread = None


class ProcessExecutor:
    """An environment in child processes, each with its own instance; a hung step's process is killed."""

    def __init__(self, factory: EnvironmentFactory, *, processes: int, timeout: float) -> None:
        """`factory` must be picklable; it runs once in each child."""
        self.parallel = processes
        self._factory = factory
        self._timeout = timeout
        self._pool: ProcessPool | None = None

    async def step(self, logs: Logs, metadata: list[Metadata]) -> Any:
        pool = self._started()
        try:
            return await asyncio.wrap_future(pool.schedule(_child_step, args=[logs, metadata], timeout=self._timeout))
        except concurrent.futures.TimeoutError as error:
            raise StepTimedOut(timed_out(self._timeout)) from error
        except Exception as error:
            raise fault_of(error) from error

    def _started(self) -> ProcessPool:
        if self._pool is None:
            import multiprocessing

            from pebble import ProcessPool

            # spawn: a forked child would inherit the event loop, its sockets and the locks of other threads.
            self._pool = ProcessPool(
                max_workers=self.parallel,
                initializer=_child_start,
                initargs=[self._factory],
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool

    async def close(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.stop()  # type: ignore[no-untyped-call]
            await asyncio.to_thread(pool.join)


def make_executor(factory: EnvironmentFactory, *, isolation: str, processes: int, timeout: float) -> StepExecutor:
    """The executor for an environment.

    Args:
        factory: Makes the environment; picklable for isolation Process.
        isolation: `Inline` or `Process`.
        processes: Child processes, with `Process`.
        timeout: Seconds that one step may take.
    """
    if isolation == "Process":
        return ProcessExecutor(factory, processes=processes, timeout=timeout)
    environment = factory()
    if inspect.iscoroutinefunction(environment.step):
        return CoroutineExecutor(environment, timeout=timeout)
    return InlineExecutor(environment, timeout=timeout)


class DaemonThread:
    """One thread that runs calls in order and does not keep the interpreter alive, unlike an executor's."""

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
        """Let the thread end after its present call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:
                # sys.exit() in somebody's code ends that call and not the program.
                future.set_exception(fault_of(error))
            else:
                future.set_result(result)


_child_environment: Any = None


def _child_start(factory: EnvironmentFactory) -> None:
    global _child_environment
    _child_environment = factory()


def _child_step(logs: Logs, metadata: list[Metadata]) -> Any:
    returned = _child_environment.step(logs, metadata)
    # A named tuple of a class that only the child can import would not unpickle in the parent.
    return tuple(returned) if isinstance(returned, tuple) else returned


def timed_out(timeout: float) -> str:
    """What is said of a step that took too long."""
    return f"step took longer than stepTimeoutSeconds ({timeout:g} s)"


def fault_of(error: BaseException) -> EnvironmentFault:
    """The typed fault for what a step raised."""
    if isinstance(error, EnvironmentFault):
        return error
    if isinstance(error, UnusableRow):
        return RowFault(str(error))
    return StepRaised(f"step raised {type(error).__name__}: {error}")
