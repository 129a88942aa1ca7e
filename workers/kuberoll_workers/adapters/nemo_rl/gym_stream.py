"""Rollouts streamed from NeMo RL's actor for NeMo Gym, with attempts and one outcome for each row."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from kuberoll_workers.adapters.nemo_rl.actors import ray_cause
from kuberoll_workers.adapters.nemo_rl.gym_rows import GymRollout, read_rollout
from kuberoll_workers.adapters.nemo_rl.limits import RolloutLimits
from kuberoll_workers.data.plain import message_of
from kuberoll_workers.data.tracebacks import traceback_of
from kuberoll_workers.environments.exception_causes import cause_of
from kuberoll_workers.environments.outcome import EnvironmentFault, RowFault
from kuberoll_workers.rollouts.failures import TrajectoryFailed, backoff, failure_of

_LONGEST_WAIT = 30.0


class Outcome(NamedTuple):
    """A row's rollout, or its failure after the last attempt."""

    row: int
    rollout: GymRollout | TrajectoryFailed


class GymStream:
    """One rollout of each row by an environment like NeMo RL's actor.

    The first call has all rows. The actor ends its stream with the first exception, so a row that did not arrive has
    not necessarily failed itself: later attempts are a call for each row.

    Attributes:
        timings: What the actor measured in the first call; empty until its last row arrived.
    """

    def __init__(
        self, environment: Any, rows: Sequence[dict[str, Any]], *, timer_prefix: str, window: int, limits: RolloutLimits
    ) -> None:
        """
        Args:
            environment: Has `run_rollouts(rows, timer_prefix, deduplicate)`, an asynchronous generator of triples (a
                row's `_rowidx`, its result, timings or None); or an actor handle whose method streams these.
            window: As in `read_rollout`.
            limits: `environment_attempts`, `backoff_seconds`, `trajectory_seconds` (of a whole call) and `concurrency`
                (of repeated calls) apply.
        """
        self._environment = environment
        self._rows = rows
        self._timer_prefix = timer_prefix
        self._window = window
        self._limits = limits
        self._outcomes: asyncio.Queue[Outcome | BaseException | None] = asyncio.Queue()
        self._repeats = asyncio.Semaphore(limits.concurrency or max(1, len(rows)))
        self._random = random.Random()
        self.timings: dict[str, Any] = {}

    async def outcomes(self) -> AsyncGenerator[Outcome, None]:
        """Yield one outcome for each row, as they come.

        Raises:
            TypeError: The environment returned a row's number that is none.
            ValueError: It returned the number of another row, or one twice.
        """
        work = asyncio.create_task(self._work())
        try:
            while (outcome := await self._outcomes.get()) is not None:
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as repeats:
                await self._first(repeats)
        except* Exception as group:
            await self._outcomes.put(_only(group))
        await self._outcomes.put(None)

    async def _first(self, repeats: asyncio.TaskGroup) -> None:
        missing = set(range(len(self._rows)))

        def faulty(number: int, fault: Exception) -> None:
            repeats.create_task(self._repeat(number, fault))

        cause: Exception = EnvironmentFault("NeMo Gym's stream ended before this row arrived")
        async with aclosing(self._call(list(self._rows), self.timings)) as stream:
            while True:
                try:
                    number, result = await anext(stream)
                except StopAsyncIteration:
                    break
                except Exception as error:
                    cause = _fault(error)
                    break
                _check_number(number, missing, len(self._rows))
                missing.discard(number)
                try:
                    rollout = read_rollout(result, window=self._window)
                except EnvironmentFault as fault:
                    faulty(number, fault)
                else:
                    await self._outcomes.put(Outcome(number, rollout))
        for number in sorted(missing):
            faulty(number, cause)

    async def _repeat(self, number: int, fault: Exception) -> None:
        tries = 1
        while tries < self._limits.environment_attempts and not isinstance(fault, RowFault):
            base = self._limits.backoff_seconds
            await asyncio.sleep(backoff(tries, base=base, longest=_LONGEST_WAIT, draw=self._random))
            tries += 1
            async with self._repeats:
                found = await self._one(number)
            if isinstance(found, GymRollout):
                await self._outcomes.put(Outcome(number, found))
                return
            fault = found
        await self._outcomes.put(Outcome(number, _failure(fault, tries)))

    async def _one(self, number: int) -> GymRollout | Exception:
        async with aclosing(self._call([self._rows[number]], {})) as stream:
            try:
                returned, result = await anext(stream)
            except StopAsyncIteration:
                return EnvironmentFault("NeMo Gym's stream ended without the row")
            except Exception as error:
                return _fault(error)
        _check_number(returned, {number}, len(self._rows))
        try:
            return read_rollout(result, window=self._window)
        except EnvironmentFault as fault:
            return fault

    async def _call(self, rows: list[dict[str, Any]], timings: dict[str, Any]) -> AsyncGenerator[tuple[Any, Any], None]:
        loop = asyncio.get_running_loop()
        seconds = self._limits.trajectory_seconds
        end = None if seconds is None else loop.time() + seconds
        async with aclosing(_streamed(self._environment.run_rollouts, rows, self._timer_prefix)) as stream:
            while True:
                try:
                    async with asyncio.timeout_at(end):
                        number, result, measured = await anext(stream)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    if end is None or loop.time() < end:
                        raise
                    raise TimeoutError(f"NeMo Gym's rollouts exceeded {seconds:g} s") from error
                if measured is not None:
                    timings.update(measured)
                yield number, result


async def _streamed(method: Any, rows: list[dict[str, Any]], timer_prefix: str) -> AsyncGenerator[Any, None]:
    # Whole media return with each result: there is nothing here that would put them back.
    if not callable(getattr(method, "remote", None)):
        async with aclosing(method(copy.deepcopy(rows), timer_prefix, False)) as items:
            async for item in items:
                yield item
        return
    references = method.options(num_returns="streaming").remote(rows, timer_prefix, False)
    ended = False
    try:
        async for reference in references:
            yield await reference
        ended = True
    finally:
        ray = sys.modules.get("ray")
        if not ended and ray is not None:
            with contextlib.suppress(Exception):
                ray.cancel(references)


def _check_number(number: Any, missing: set[int], count: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"NeMo Gym returned {number!r} as the number of a row")
    if not 0 <= number < count:
        raise ValueError(f"NeMo Gym returned row {number}, but there are {count} rows")
    if number not in missing:
        raise ValueError(f"NeMo Gym returned row {number} twice or unasked")


def _only(group: BaseExceptionGroup[Exception]) -> Exception:
    first = group.exceptions[0]
    return _only(first) if isinstance(first, BaseExceptionGroup) else first


def _fault(error: Exception) -> Exception:
    cause = ray_cause(error)
    return cause if isinstance(cause, Exception) else error


def _failure(fault: Exception, tries: int) -> TrajectoryFailed:
    if _is_infrastructure(fault):
        words = f"{type(fault).__name__}: {message_of(fault)}"
        return TrajectoryFailed(words, reason="EnvironmentUnreachable", stage="environment", tries=tries)
    if isinstance(fault, EnvironmentFault):
        return failure_of(fault, stage="environment", tries=tries)
    # What Gym's actor raises is the environment's, or of what that depends on.
    return TrajectoryFailed(
        message_of(fault) or type(fault).__name__,
        reason=cause_of(fault),
        stage="environment",
        tries=tries,
        traceback=traceback_of(fault),
    )


def _is_infrastructure(fault: Exception) -> bool:
    # NeMo RL's class, by its name: NeMo RL need not be installed.
    if any(base.__name__ == "RolloutInfraFailure" for base in type(fault).__mro__):
        return True
    ray = sys.modules.get("ray")
    return isinstance(fault, TimeoutError | ConnectionError) or (
        ray is not None and isinstance(fault, ray.exceptions.RayActorError)
    )
