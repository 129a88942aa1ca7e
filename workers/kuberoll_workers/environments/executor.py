"""The interface between an environment's episodes and the place where its calls are run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from kuberoll_workers.environments.batches import Batch
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.outcome import EnvironmentFault

_Result = TypeVar("_Result")


class Executor(Protocol):
    """Runs batches of calls of one environment without blocking the event loop."""

    @property
    def parallel(self) -> int | None:
        """Number of calls worth running concurrently; None for no limit."""
        ...

    @property
    def batched(self) -> bool:
        """True if one call for several episodes costs less than one for each."""
        ...

    @property
    def timeout(self) -> float:
        """Time limit of one call, in seconds."""
        ...

    async def hooks(self) -> Hooks:
        """Hooks of the environment, which is created if it is not there yet.

        Raises:
            EnvironmentFault: It could not be created.
        """
        ...

    async def run(self, batch: Batch[_Result]) -> Sequence[_Result | EnvironmentFault]:
        """Run one call, validate its result and split it by episode.

        The time limit is that of the call, whoever runs it. Where it was for several episodes, the batcher makes a call
        for each of them after it: an episode fails for its time only by a call of its own.

        Raises:
            StepRaised, StepTimedOut, StepInvalid: The environment's fault.
            RowFault: The environment reported an unusable dataset row.
        """
        ...

    def instances(self) -> Sequence[Executor]:
        """Executors that each have one instance of the environment; this one is not used any more."""
        ...

    async def close(self) -> None:
        """Shut the environment down, and release all threads and processes."""
        ...


@runtime_checkable
class SparingExecutor(Executor, Protocol):
    """An executor that has further places for calls while others take unusually long.

    Attributes:
        spare: Number of these places; 0: none.
    """

    spare: int

    async def run(
        self, batch: Batch[_Result], *, limit: float | None = None, began: Callable[[], None] | None = None
    ) -> Sequence[_Result | EnvironmentFault]:
        """Run one call, as other executors do.

        Args:
            limit: Time limit in seconds, if it is not the environment's own.
            began: Called when the call has a place.
        """
        ...

    def end_spares(self) -> None:
        """Release the further places that are free."""
        ...


@runtime_checkable
class PreparingExecutor(Executor, Protocol):
    """An executor whose calls are made in one instance, in the order in which they are asked for, without waiting.

    Attributes:
        prepares: Whether an episode may be prepared by one call, and played by another.
    """

    prepares: bool


def is_cancelled() -> bool:
    """True if the current task is being cancelled, False if foreign code raised CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
