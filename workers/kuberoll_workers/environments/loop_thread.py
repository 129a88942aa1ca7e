"""Coroutine environments on an event loop of their own, in a thread: their code never runs on the worker's loop.

What such code does to its loop, it does to the other steps of its environment at most, and the worker names it: a step
that blocks the loop, stops it, or cancels all of its tasks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, Final, TypeVar

from kuberoll_workers.data.tracebacks import Traceback, location, stack_of, stack_of_calls
from kuberoll_workers.environments.batches import Batch
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.outcome import (
    SHUTDOWN_SECONDS,
    EnvironmentFault,
    EpisodeLost,
    StepRaised,
    StepTimedOut,
    fault_of,
    timed_out,
    timeout_message,
)

MAX_LATE_CALLS: Final = 256
"""Limit of the calls that have exceeded their time, were cancelled, and go on nevertheless."""
_BEAT_SECONDS: Final = 0.1
_LEAVE_SECONDS: Final = 1.0
_WARN_SECONDS: Final = 1.0
_MAX_REPEATS: Final = 3
_CANCELLED: Final = "it was cancelled by other code"

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class LoopLost(Exception):
    """The loop, or foreign code in it, has ended a call through no fault of the call's own."""


class LoopThread:
    """An event loop in a daemon thread, and a watch over it.

    Attributes:
        calls: Number of calls that somebody waits for; without any there is no watch.
        stalled: Seconds in all for which the loop did not turn, because one of its steps did not return.
        blocking: The part of them that is due to each task.
        blocker: The task that blocks the loop now.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.calls = 0
        self.stalled = 0.0
        self.blocking: weakref.WeakKeyDictionary[asyncio.Task[Any], float] = weakref.WeakKeyDictionary()
        self.blocker: asyncio.Task[Any] | None = None
        self._beaten = True
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kuberoll-environment-loop", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="kuberoll-environment-watch", daemon=True).start()

    def stack(self) -> Traceback | None:
        """The calls that the thread is in."""
        return stack_of(sys._current_frames().get(self._thread.ident or 0))

    def end(self) -> None:
        """Let the thread end, when what blocks it returns; nothing waits for that."""
        self._ended.set()
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ended.is_set():
            try:
                # Code in it may stop it, or raise what ends it.
                self.loop.run_forever()
            except BaseException as error:
                _log.warning("an environment's event loop was ended by %s, and goes on", type(error).__name__)
        with contextlib.suppress(BaseException):
            self._leave()
        self.loop.close()

    def _leave(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=_LEAVE_SECONDS))
        for task in tasks:
            # What does not let itself be cancelled is no news by now.
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    def _watch(self) -> None:
        blocked = 0.0
        while not self._ended.wait(_BEAT_SECONDS):
            if self._beaten or not self.calls:
                blocked, self.blocker = 0.0, None
                if self.calls:
                    self._beaten = False
                    with contextlib.suppress(RuntimeError):
                        self.loop.call_soon_threadsafe(self._beat)
                continue
            self.stalled += _BEAT_SECONDS
            blocked += _BEAT_SECONDS
            self.blocker = asyncio.current_task(self.loop)
            if self.blocker is not None:
                self.blocking[self.blocker] = self.blocking.get(self.blocker, 0.0) + _BEAT_SECONDS
            if blocked - _BEAT_SECONDS < _WARN_SECONDS <= blocked:
                self._warn()

    def _warn(self) -> None:
        stack = self.stack()
        where = location(stack.frames) if stack is not None else ""
        _log.warning(
            "an environment blocks its event loop, and all of its other steps wait: %s. Use asyncio.to_thread for what "
            "blocks, or isolation: Process",
            where or "no Python code",
        )

    def _beat(self) -> None:
        self._beaten = True


class _Call:
    """One call of the environment.

    Attributes:
        waiter: Completed in the worker's loop with the call's results.
        task: The call in the environment's loop; None if it has not begun.
        given_up: Nobody waits for it any more.
    """

    __slots__ = ("batch", "given_up", "home", "task", "waiter")

    def __init__(self, batch: Batch[Any]) -> None:
        self.batch = batch
        self.home = asyncio.get_running_loop()
        self.waiter: asyncio.Future[Any] = self.home.create_future()
        self.task: asyncio.Task[Any] | None = None
        self.given_up = False

    def complete(self, results: Any, error: BaseException | None) -> None:
        """Hand the results over to the worker's loop; called in another thread."""

        def hand_over() -> None:
            if not self.waiter.done():
                if error is None:
                    self.waiter.set_result(results)
                else:
                    self.waiter.set_exception(error)

        # The worker may have ended.
        with contextlib.suppress(RuntimeError):
            self.home.call_soon_threadsafe(hand_over)


class LoopExecutor:
    """Runs an environment whose `step` is a coroutine function, one episode in each call, on a loop of its own.

    Any number of calls is made concurrently, unless the environment has an attribute `parallel_steps`: those that wait
    for their turn are not on a time limit. Nor does the time count for which another call blocks the loop. One that
    blocks it for longer than its own time limit is left behind with the loop and its instance of the environment, and
    the other calls are made again in another one; the episodes of a stateful environment are lost with theirs.
    """

    batched = False
    prepares = True

    def __init__(self, make: Callable[[], Any], environment: Any, *, timeout: float) -> None:
        """
        Args:
            make: Makes another instance.
            environment: The first one.
            timeout: Time limit of one call, in seconds.
        """
        self.parallel: int | None = getattr(environment, "parallel_steps", None)
        self.timeout = timeout
        self._make = make
        self._environment = environment
        self._hooks = Hooks.of(environment)
        self._thread = LoopThread()
        self._calls: dict[_Call, LoopThread] = {}
        self._late: set[_Call] = set()
        self._repeating = asyncio.Lock()
        self._replaced: dict[LoopThread, asyncio.Lock] = {}
        self._process = os.getpid()

    async def hooks(self) -> Hooks:
        return self._hooks

    def instances(self) -> Sequence[LoopExecutor]:
        return [self]

    async def run(self, batch: Batch[_Result]) -> Sequence[_Result | EnvironmentFault]:
        if len(self._late) >= MAX_LATE_CALLS:
            raise StepTimedOut(
                f"{len(self._late)} calls of this environment took too long, were cancelled, and still go on; set "
                "isolation: Process, where a call that hangs is killed"
            )
        try:
            return await self._once(batch)
        except LoopLost as lost:
            reason = lost
        if self._hooks.stateful:
            raise EpisodeLost(str(reason))
        # Beside others of its kind nobody could tell who disturbs whom.
        async with self._repeating:
            for _ in range(_MAX_REPEATS):
                try:
                    return await self._once(batch)
                except LoopLost as lost:
                    reason = lost
        raise StepRaised(f"{batch.method}: {reason}")

    async def close(self) -> None:
        """Shut the environment down, if it lets itself be, and leave its loop."""
        if self._hooks.shutdown:
            call = _Call(_Shutdown())
            self._thread.loop.call_soon_threadsafe(self._begin, call, self._environment)
            try:
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await call.waiter
            except TimeoutError:
                _log.warning("%s", timeout_message(SHUTDOWN_SECONDS, "shutdown"))
            except (EnvironmentFault, LoopLost) as error:
                _log.warning("%s", error)
        self._thread.end()

    async def _once(self, batch: Batch[_Result]) -> Sequence[_Result | EnvironmentFault]:
        thread, call = self._thread, _Call(batch)
        thread.calls += 1
        self._calls[call] = thread
        thread.loop.call_soon_threadsafe(self._begin, call, self._environment)
        try:
            results: Sequence[_Result | EnvironmentFault] = await self._finished(call, thread)
            return results
        finally:
            del self._calls[call]
            thread.calls -= 1
            if not call.waiter.done():
                self._give_up(call, thread)

    async def _finished(self, call: _Call, thread: LoopThread) -> Any:
        left = self.timeout
        while True:
            stalled, own = thread.stalled, self._own(call, thread)
            try:
                async with asyncio.timeout(left):
                    return await asyncio.shield(call.waiter)
            except TimeoutError as error:
                if call.waiter.done():
                    return call.waiter.result()
                # What others have taken of its time comes back.
                left = (thread.stalled - stalled) - (self._own(call, thread) - own)
                if left > _BEAT_SECONDS:
                    continue
                blocks = thread.blocker is not None and thread.blocker is call.task
                fault = timed_out(self.timeout, call.batch.method, thread.stack() if blocks else _waits_at(call.task))
                if blocks:
                    await self._replace(thread, call, fault)
                raise fault from error

    @staticmethod
    def _own(call: _Call, thread: LoopThread) -> float:
        return 0.0 if call.task is None else thread.blocking.get(call.task, 0.0)

    async def _replace(self, thread: LoopThread, blocking: _Call, fault: EnvironmentFault) -> None:
        """Leave a loop behind that is blocked, and its instance of the environment."""
        if thread is not self._thread:
            return
        replaced = self._replaced.setdefault(thread, asyncio.Lock())
        if replaced.locked():
            return
        async with replaced:
            made = await _in_thread(self._make)
            if made is self._environment:
                return
            self._thread, self._environment = LoopThread(), made
            del self._replaced[thread]
            thread.end()
            for call, where in self._calls.items():
                if where is thread and call is not blocking and not call.waiter.done():
                    call.waiter.set_exception(
                        LoopLost(f"another call has blocked the environment's event loop: {fault}")
                    )

    def _give_up(self, call: _Call, thread: LoopThread) -> None:
        call.given_up = True
        self._late.add(call)

        def cancel() -> None:
            if call.task is None or call.task.done():
                call.complete(None, LoopLost())
            else:
                call.task.cancel()

        def forget(waiter: asyncio.Future[Any]) -> None:
            self._late.discard(call)
            if not waiter.cancelled():
                # Retrieved, so that asyncio does not log it as never retrieved.
                waiter.exception()

        call.waiter.add_done_callback(forget)
        with contextlib.suppress(RuntimeError):
            thread.loop.call_soon_threadsafe(cancel)

    # ---- in the environment's thread

    def _begin(self, call: _Call, environment: Any) -> None:
        if not call.given_up:
            call.task = asyncio.get_running_loop().create_task(self._called(call, environment))
            # One that is cancelled before its first step does not come to complete the call itself.
            call.task.add_done_callback(
                lambda task: call.complete(None, LoopLost(_CANCELLED)) if task.cancelled() else None
            )

    async def _called(self, call: _Call, environment: Any) -> None:
        results, error = None, None
        try:
            returned = call.batch.invoke(environment)
            results = call.batch.split(await returned if inspect.isawaitable(returned) else returned)
        except GeneratorExit:
            # Its loop is gone.
            raise
        except BaseException as raised:
            task = asyncio.current_task()
            cancelled = isinstance(raised, asyncio.CancelledError) and task is not None and task.cancelling() > 0
            error = LoopLost(_CANCELLED) if cancelled else fault_of(raised, call.batch.method)
        if os.getpid() != self._process:
            # A copy of the worker that the environment has forked.
            os._exit(0)
        call.complete(results, error)


async def _in_thread(make: Callable[[], Any]) -> Any:
    """The result of a call in a thread that keeps no program from its end."""
    made: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(fault_of(error, "the constructor of another instance"))

    threading.Thread(target=run, name="kuberoll-environment-constructor", daemon=True).start()
    return await asyncio.wrap_future(made)


class _Shutdown:
    """The call of `shutdown`, as a batch."""

    method: ClassVar[str] = "shutdown"
    shared: ClassVar[bool] = False

    @classmethod
    def of(cls, items: Sequence[Any]) -> _Shutdown:  # noqa: ARG003
        return cls()

    def __len__(self) -> int:
        return 1

    def invoke(self, environment: Any) -> Any:
        return environment.shutdown()

    def split(self, returned: Any) -> list[None]:  # noqa: ARG002 - nothing is expected
        return [None]


def _waits_at(task: asyncio.Task[Any] | None) -> Traceback | None:
    """What a task waits for, as a stack; its loop may go on meanwhile."""
    frames: list[FrameType] = []
    waits: Any = None if task is None else task.get_coro()
    while waits is not None and len(frames) < 50:
        frame = getattr(waits, "cr_frame", None)
        if frame is None:
            break
        frames.append(frame)
        waits = getattr(waits, "cr_await", None)
    return stack_of_calls(frames)
