"""Environments in Ray actors, or in objects with the same interface: `step.remote` returns an awaitable."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from kuberoll_workers.data.tracebacks import Traceback, parse_traceback
from kuberoll_workers.environments.batches import Batch
from kuberoll_workers.environments.executor import Executor, is_cancelled
from kuberoll_workers.environments.hooks import NO_HOOKS, Hooks
from kuberoll_workers.environments.inline import CoroutineExecutor, InlineExecutor, with_any_metadata
from kuberoll_workers.environments.outcome import (
    EnvironmentFault,
    StepRaised,
    StepTimedOut,
    fault_of,
    timeout_message,
)

_Result = TypeVar("_Result")

MAX_ABANDONED_CALLS = 4
"""Maximum number of timed-out calls that still run: an actor's method cannot be interrupted, and further calls would
only wait behind them and time out, too."""


class ActorExecutor:
    """An environment behind `step.remote`: its calls are awaited on the event loop, without a thread for each.

    A call costs about 1 ms of CPU, however many trajectories it is for; up to `calls_in_flight` are made at once. An
    actor works on one at a time unless it was made with `max_concurrency` or has coroutine methods.
    """

    batched = True

    def __init__(self, environment: Any, *, timeout: float, calls_in_flight: int, any_metadata: bool = False) -> None:
        """
        Args:
            environment: A Ray actor handle; `step.remote` may also return an awaitable, a concurrent future, or the
                answer itself.
            timeout: Seconds that one call may take.
            any_metadata: As in `split_return`.
        """
        self._any_metadata = any_metadata
        self.parallel = calls_in_flight
        self._environment = environment
        self.timeout = timeout
        self._abandoned: set[asyncio.Future[Any]] = set()

    async def hooks(self) -> Hooks:
        # The caller owns the actor, and NeMo RL's environments have no episodes.
        return NO_HOOKS

    def instances(self) -> Sequence[Executor]:
        return [self]

    async def run(self, batch: Batch[_Result]) -> Sequence[_Result | EnvironmentFault]:
        if len(self._abandoned) >= MAX_ABANDONED_CALLS:
            raise StepTimedOut(
                f"the environment still works on {len(self._abandoned)} calls that took longer than "
                f"stepTimeoutSeconds ({self.timeout:g} s), and is not called again until one of them ends"
            )
        steps: Any = with_any_metadata(batch) if self._any_metadata else batch
        try:
            answer = self._environment.step.remote(*steps.arguments())
        except Exception as error:
            raise _fault(error) from error
        pending = _pending(answer)
        returned = answer if pending is None else await self._answer(answer, pending)
        try:
            results: Sequence[_Result | EnvironmentFault] = steps.split(returned)
            return results
        except BaseException as error:
            raise _fault(error) from error

    async def _answer(self, answer: Any, pending: asyncio.Future[Any]) -> Any:
        timeout = asyncio.timeout(self.timeout)
        try:
            async with timeout:
                # Shielded, so that an abandoned call is known to run until it ends.
                return await asyncio.shield(pending)
        except asyncio.CancelledError as error:
            self._abandon(answer, pending)
            if is_cancelled():
                raise
            raise _fault(error) from error
        except Exception as error:
            if not timeout.expired():
                raise _fault(error) from error
            self._abandon(answer, pending)
            raise StepTimedOut(timeout_message(self.timeout)) from error

    async def close(self) -> None:
        # The caller owns the actor and ends it.
        for pending in self._abandoned:
            pending.cancel()

    def _abandon(self, answer: Any, pending: asyncio.Future[Any]) -> None:
        if pending.done():
            return
        self._abandoned.add(pending)
        pending.add_done_callback(self._ended)
        _cancel(answer)

    def _ended(self, pending: asyncio.Future[Any]) -> None:
        self._abandoned.discard(pending)
        if not pending.cancelled():
            # Retrieve the exception, so that asyncio does not report it.
            pending.exception()


def executor_for(environment: Any, *, timeout: float, calls_in_flight: int = 1, any_metadata: bool = False) -> Executor:
    """Create the executor for an existing environment.

    Args:
        environment: A Ray actor handle, or an object whose `step` is a coroutine function or a plain one.
        timeout: Seconds that one step may take.
        calls_in_flight: Maximum number of concurrent calls to a Ray actor.
        any_metadata: As in `split_return`; metadata that is not plain data is passed without a copy.
    """
    if callable(getattr(environment.step, "remote", None)):
        return ActorExecutor(environment, timeout=timeout, calls_in_flight=calls_in_flight, any_metadata=any_metadata)
    if inspect.iscoroutinefunction(environment.step):
        return CoroutineExecutor(environment, timeout=timeout, any_metadata=any_metadata, shuts_down=False)
    return InlineExecutor(environment, timeout=timeout, any_metadata=any_metadata, shuts_down=False)


def ray_cause(error: BaseException) -> BaseException:
    """The exception that was raised in a Ray task or actor; other exceptions are returned unchanged."""
    # Without Ray loaded nothing can be one of its exceptions.
    ray = sys.modules.get("ray")
    while ray is not None and isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if not isinstance(cause, BaseException):
            break
        error = cause
    return error


def _fault(error: BaseException) -> EnvironmentFault:
    cause = ray_cause(error)
    fault = fault_of(cause)
    if isinstance(fault, StepRaised) and (printed := _traceback_from_ray(error)) is not None:
        fault.traceback = printed
    return fault


def _traceback_from_ray(error: BaseException) -> Traceback | None:
    """The traceback in an actor, which Ray sends as text; the exception itself loses it on its way."""
    ray = sys.modules.get("ray")
    return parse_traceback(str(error)) if ray is not None and isinstance(error, ray.exceptions.RayTaskError) else None


def _pending(answer: Any) -> asyncio.Future[Any] | None:
    """The future of a result; None if the result is there already."""
    if isinstance(answer, concurrent.futures.Future):
        return asyncio.wrap_future(answer)
    if inspect.isawaitable(answer):
        return asyncio.ensure_future(answer)
    return None


def _cancel(answer: Any) -> None:
    if isinstance(answer, concurrent.futures.Future):
        answer.cancel()
        return
    ray = sys.modules.get("ray")
    # This cancels a queued call or a coroutine; a running method continues.
    if ray is not None and isinstance(answer, ray.ObjectRef):
        with contextlib.suppress(Exception):
            ray.cancel(answer)
