"""Whether an engine's process goes on: it answers a call between two of its steps.

A process that is stopped, or waits for a GPU that does not answer, ends no request and breaks no connection; nor do its
results tell, since long responses leave it rarely. vLLM's core handles calls between its steps, so one that is not
answered for longer than any step takes says that there was no further step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kuberoll_workers.policy.interface import PolicyUnavailable


class EngineStalled(PolicyUnavailable):
    """The engine has made no step for a while.

    Attributes:
        seconds: Time since which.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the engine has made no step for {seconds:.0f} s")
        self.seconds = seconds


class Pulse:
    """One call of the engine at a time, and for how long it has waited."""

    def __init__(self, call: Callable[[], Awaitable[Any]], *, stall_seconds: float) -> None:
        """
        Args:
            call: What the engine answers between two steps.
            stall_seconds: Longer than any step takes.
        """
        self._call = call
        self._stall_seconds = stall_seconds
        self._waiting: asyncio.Task[Any] | None = None
        self._began = 0.0

    def check(self) -> None:
        """Begin a call, unless one waits.

        Raises:
            EngineStalled: One has waited for too long.
        """
        now = asyncio.get_running_loop().time()
        if self._waiting is None:
            self._began = now
            self._waiting = asyncio.ensure_future(self._call())
            self._waiting.add_done_callback(self._end)
        elif now - self._began > self._stall_seconds:
            raise EngineStalled(now - self._began)

    def stop(self) -> None:
        """Forget the call that waits, for example since the engine is at work that takes longer than a step."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()

    def _end(self, task: asyncio.Future[Any]) -> None:
        # An engine that is dead says so elsewhere.
        if not task.cancelled():
            task.exception()
        if self._waiting is task:
            self._waiting = None
