"""Executors in this process: the caller's event loop, or a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import inspect
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kuberoll_workers.data.tracebacks import Traceback, stack_of
from kuberoll_workers.environments.batches import Batch, StepBatch, awaited
from kuberoll_workers.environments.executor import Executor, is_cancelled
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.outcome import (
    SHUTDOWN_SECONDS,
    EnvironmentFault,
    StepTimedOut,
    fault_of,
    timed_out,
    timeout_message,
)

EnvironmentFactory = Callable[[], Any]

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)

MAX_ABANDONED_THREADS = 16
"""Limit of the threads that hang at a time: threads cannot be killed."""


class CoroutineExecutor:
    """Runs a caller's own environment, whose `step` is a coroutine function, on the caller's event loop.

    Each call is for one episode. Any number of them is made concurrently, unless the environment has an attribute
    `parallel_steps`: those that wait for their turn are not on a time limit.
    """

    batched = False
    prepares = True

    def __init__(
        self, environment: Any, *, timeout: float, any_metadata: bool = False, shuts_down: bool = True
    ) -> None:
        """
        Args:
            timeout: Time limit of one call, in seconds.
            any_metadata: As in `StepBatch`.
            shuts_down: Call the environment's `shutdown` at the end; False if it is the caller's.
        """
        self.parallel: int | None = getattr(environment, "parallel_steps", None)
        self._environment = environment
        self._hooks = Hooks.of(environment)
        self._shuts_down = shuts_down and self._hooks.shutdown
        self.timeout = timeout
        self._any_metadata = any_metadata
        self._calls: set[asyncio.Task[Any]] = set()

    async def hooks(self) -> Hooks:
        return self._hooks

    async def run(self, batch: Batch[_Result]) -> Sequence[_Result | EnvironmentFault]:
        # A separate task: code that ignores cancellation keeps its task, and nothing waits for it.
        call = asyncio.create_task(self._run(with_any_metadata(batch) if self._any_metadata else batch))
        self._calls.add(call)
        call.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(self.timeout):
                return await asyncio.shield(call)
        except TimeoutError as error:
            raise StepTimedOut(timeout_message(self.timeout, batch.method)) from error
        finally:
            call.cancel()

    def _ended(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            # Retrieved, so that asyncio does not log it as never retrieved.
            call.exception()

    async def _run(self, batch: Batch[_Result]) -> Sequence[_Result | EnvironmentFault]:
        try:
            returned = batch.invoke(self._environment)
            return batch.split(await returned if inspect.isawaitable(returned) else returned)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise fault_of(error, batch.method) from error
        except BaseException as error:
            # The environment's own TimeoutError is not our time limit, and its sys.exit() must not end the program.
            raise fault_of(error, batch.method) from error

    def instances(self) -> Sequence[Executor]:
        return [self]

    async def close(self) -> None:
        if not self._shuts_down:
            return
        try:
            async with asyncio.timeout(SHUTDOWN_SECONDS):
                ended = self._environment.shutdown()
                if inspect.isawaitable(ended):
                    await ended
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            log_shutdown(error)


class InlineExecutor:
    """Runs a plain environment in one daemon thread.

    A call that exceeds its time limit keeps its thread and its instance until it returns. The calls after it are made
    in another instance, where one can be made and no episode depends on this one; else they wait for it, for a time
    limit more. Only beside a call that has hung for even longer is an instance in two calls at a time.
    """

    parallel = 1
    batched = True

    def __init__(
        self,
        environment: Any,
        *,
        timeout: float,
        any_metadata: bool = False,
        shuts_down: bool = True,
        make: EnvironmentFactory | None = None,
    ) -> None:
        """
        Args:
            timeout: Time limit of one call, in seconds.
            any_metadata: As in `StepBatch`.
            shuts_down: Call the environment's `shutdown` at the end; False if it is the caller's.
            make: Makes another instance; None: there is only this one.
        """
        self._environment = environment
        self._hooks = Hooks.of(environment)
        self._shuts_down = shuts_down and self._hooks.shutdown
        self.timeout = timeout
        self._any_metadata = any_metadata
        self._make = None if self._hooks.stateful else make
        self._thread: DaemonThread | None = None
        # The call that has exceeded its time in this thread, and those in the threads before it, while they go on.
        self._hung: concurrent.futures.Future[Any] | None = None
        self._left: set[concurrent.futures.Future[Any]] = set()
        self._process = os.getpid()

    async def hooks(self) -> Hooks:
        return self._hooks

    async def run(self, batch: Batch[_Result]) -> Sequence[_Result | EnvironmentFault]:
        if self._hung is not None and not self._hung.done():
            await self._pass(self._hung)
        self._hung = None
        if self._thread is None:
            self._thread = DaemonThread()
        thread, environment = self._thread, self._environment
        prepared = with_any_metadata(batch) if self._any_metadata else batch
        future = thread.submit(lambda: self._run(prepared, environment))
        try:
            async with asyncio.timeout(self.timeout):
                result: Sequence[_Result | EnvironmentFault] = await asyncio.shield(asyncio.wrap_future(future))
                return result
        except TimeoutError as error:
            self._hung = future
            raise timed_out(self.timeout, batch.method, thread.stack()) from error
        except asyncio.CancelledError:
            if not future.cancel() and not future.done():
                self._hung = future
            raise

    async def _pass(self, hung: concurrent.futures.Future[Any]) -> None:
        """Get past a call that has not returned: by another instance, or by waiting for its end."""
        self._left = {future for future in self._left if not future.done()}
        left = len(self._left)
        if left >= MAX_ABANDONED_THREADS:
            raise StepTimedOut(
                f"{left + 1} calls of this environment hang and block their threads; set isolation: Process, where a "
                "call that hangs is killed"
            )
        thread, made = DaemonThread(), self._environment
        try:
            if self._make is not None:
                try:
                    made = await asyncio.wrap_future(thread.submit(self._make))
                except Exception as error:
                    raise fault_of(error, "the constructor of another instance") from error
            if made is self._environment:
                await asyncio.wait({asyncio.wrap_future(hung)}, timeout=self.timeout)
                if hung.done():
                    thread.abandon()
                    return
        except BaseException:
            thread.abandon()
            raise
        assert self._thread is not None
        self._thread.abandon()
        self._left.add(hung)
        self._thread, self._environment = thread, made

    def _run(self, batch: Batch[_Result], environment: Any) -> Sequence[_Result | EnvironmentFault]:
        # Validation and error messages run code of the environment's objects, which may hang like the call itself, so
        # they run in this thread, too. StopIteration and CancelledError have a special meaning to a future.
        try:
            return batch.split(awaited(batch.invoke(environment)))
        except BaseException as error:
            raise fault_of(error, batch.method) from error
        finally:
            if os.getpid() != self._process:
                # A copy of the worker that the environment has forked.
                os._exit(0)

    def instances(self) -> Sequence[Executor]:
        return [self]

    async def close(self) -> None:
        if self._shuts_down and (self._hung is None or self._hung.done()):
            if self._thread is None:
                self._thread = DaemonThread()
            ended = self._thread.submit(lambda: awaited(self._environment.shutdown()))
            try:
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await asyncio.wrap_future(ended)
            except Exception as error:
                log_shutdown(error)
        if self._thread is not None:
            self._thread.abandon()
            self._thread = None


class DaemonThread:
    """A thread that runs calls in order and, unlike an executor's, does not keep the interpreter alive."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="kuberoll-environment", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put((call, future))
        return future

    def stack(self) -> Traceback | None:
        """The calls that the thread is in."""
        return stack_of(sys._current_frames().get(self._thread.ident or 0))

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


def with_any_metadata(batch: Batch[_Result]) -> Batch[_Result]:
    """The batch, whose metadata may be any objects if it is one of steps."""
    return dataclasses.replace(batch, any_metadata=True) if isinstance(batch, StepBatch) else batch


def log_shutdown(error: BaseException) -> None:
    """Log an error of an environment's `shutdown`, which is of no consequence for its trajectories."""
    fault = StepTimedOut(timeout_message(SHUTDOWN_SECONDS, "shutdown")) if isinstance(error, TimeoutError) else error
    _log.warning("%s", fault_of(fault, "shutdown"))
