"""Attempts of what may fail: retries with backoff, and the time limit of a turn; the same for every player."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kuberoll_workers.data.plain import message_of
from kuberoll_workers.rollouts.failures import (
    Stage,
    TrajectoryFailed,
    backoff,
    cause_of_error,
    failure_of,
    is_retryable,
)
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.settings import RolloutSettings

_Result = TypeVar("_Result")


class StartOver(Exception):
    """The trajectory's episode is lost, and its environment cannot restore it: the trajectory starts over."""


class Attempts:
    """Retries and time limits of a run."""

    def __init__(self, settings: RolloutSettings, *, jitter_seed: int | None = None) -> None:
        """`jitter_seed` is the seed of the jitter of backoff; None: random."""
        self._retries = settings.retries
        self._turn_seconds = settings.turn_seconds
        # For the jitter of backoff only; trajectories do not depend on it.
        self._draw = random.Random(jitter_seed)

    def most(self, stage: Stage) -> int:
        """The number of attempts that a stage has."""
        retries = self._retries
        return retries.generation_attempts if stage == "generation" else retries.environment_attempts

    async def make(
        self,
        flight: InFlight,
        stage: Stage,
        operation: Callable[[int], Awaitable[_Result]],
        *,
        tokens: Callable[[], int] = lambda: 0,
    ) -> _Result:
        """Make attempts of an operation until one succeeds.

        Args:
            operation: Given the number of attempts that failed before.
            tokens: How many generated tokens the attempt that has just failed throws away.

        Raises:
            StartOver: An attempt raised it.
            TrajectoryFailed: After the last attempt, or after one whose error no other attempt would mend.
        """
        retries = self._retries
        tries = 0
        while True:
            try:
                return await operation(tries)
            except (StartOver, TrajectoryFailed):
                raise
            except Exception as error:
                tries += 1
                if tries >= self.most(stage) or not is_retryable(error):
                    raise failure_of(error, stage=stage, tries=tries) from error
                pause = backoff(
                    tries, base=retries.backoff_seconds, longest=retries.max_backoff_seconds, draw=self._draw
                )
                flight.note_incident(
                    cause_of_error(error),
                    message_of(error),
                    stage=stage,
                    sequel="tried again",
                    pause=pause,
                    tokens=tokens(),
                )
            flight.metrics.record_retry(stage)
            await asyncio.sleep(pause)

    def within_turn(
        self, stage: Stage, used: float, operation: Coroutine[Any, Any, _Result]
    ) -> Coroutine[Any, Any, _Result]:
        """Limit an operation to the rest of its turn's time.

        Args:
            used: Seconds of it that earlier stages have taken.

        Raises:
            TrajectoryFailed: When awaited, if the time is over.
        """
        limit = self._turn_seconds
        return operation if limit is None else _limited(stage, used, limit, operation)


async def _limited(stage: Stage, used: float, limit: float, operation: Coroutine[Any, Any, _Result]) -> _Result:
    timeout = asyncio.timeout(max(0.0, limit - used))
    try:
        async with timeout:
            return await operation
    except TimeoutError as error:
        if not timeout.expired():
            raise
        cause = f"the turn took longer than rollout.timeouts.turnSeconds ({limit:g} s)"
        raise TrajectoryFailed(cause, reason="TurnDeadline", stage=stage) from error
