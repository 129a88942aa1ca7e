"""Waiting until an endpoint is ready, with reports of the reason why it is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from kuberoll_workers.policy.interface import EngineInfo, PolicyUnavailable

CHANGE_SECONDS: Final = 5.0
"""Minimum seconds between reports of different troubles."""
REPEAT_SECONDS: Final = 10.0
"""Seconds after which an unchanged trouble is reported again."""


class TroubleReports:
    """Limits reports of troubles: the first one, changes, and from time to time the same one again."""

    def __init__(self, report: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._last: str | None = None
        self._at = 0.0

    def add(self, trouble: str) -> None:
        """Report a trouble, unless it was reported recently."""
        since = self._clock() - self._at
        if self._last is None or since >= (REPEAT_SECONDS if trouble == self._last else CHANGE_SECONDS):
            self._last, self._at = trouble, self._clock()
            self._report(trouble)


async def wait_until_ready(
    url: str,
    ask: Callable[[], Awaitable[EngineInfo]],
    *,
    seconds: float,
    interval: float,
    trouble: Callable[[str], None] | None = None,
) -> EngineInfo:
    """Poll an endpoint until it is ready; return its description.

    Args:
        ask: Raises PolicyUnavailable while the endpoint is not ready.
        seconds: Maximum time to wait.
        interval: Seconds between two attempts.
        trouble: Called with the reason while the endpoint is not ready.

    Raises:
        PolicyUnavailable: It was not ready in time; the message has the last reason.
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
