"""Waiting for an endpoint, and telling meanwhile what keeps it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from kuberoll_workers.policy.interface import EngineInfo, PolicyUnavailable

CHANGE_SECONDS: Final = 5.0
"""The least between two different troubles that are told."""
REPEAT_SECONDS: Final = 30.0
"""After which the same trouble is told again."""


class TroubleReports:
    """Decides what of a stream of troubles is news: the first, another one, and once in a while the same again."""

    def __init__(self, tell: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._told: str | None = None
        self._at = 0.0

    def add(self, trouble: str) -> None:
        """There is trouble now."""
        since = self._clock() - self._at
        if self._told is None or since >= (REPEAT_SECONDS if trouble == self._told else CHANGE_SECONDS):
            self._told, self._at = trouble, self._clock()
            self._tell(trouble)


async def wait_until_ready(
    url: str,
    ask: Callable[[], Awaitable[EngineInfo]],
    *,
    seconds: float,
    interval: float,
    trouble: Callable[[str], None] | None = None,
) -> EngineInfo:
    """Ask again and again until there is an answer.

    Args:
        ask: Raises PolicyUnavailable while it has none.
        seconds: To wait at most.
        interval: Seconds between two times.
        trouble: Told why there is none, from the first time on.

    Raises:
        PolicyUnavailable: There was none within so many seconds; says why at last.
    """
    last = "no answer"
    troubles = TroubleReports(trouble or (lambda _: None))
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await ask()
                except PolicyUnavailable as error:
                    last = str(error)
                troubles.add(last)
                await asyncio.sleep(interval)
    except TimeoutError as error:
        raise PolicyUnavailable(f"{url} was not ready within {seconds:g} s: {last}") from error
