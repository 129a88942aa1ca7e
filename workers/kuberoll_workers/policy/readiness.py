"""Waiting for an endpoint, at the start and in mid-run, with reports of the reason why it does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from kuberoll_workers.data.text import clock
from kuberoll_workers.policy.interface import EngineInfo, PolicyUnavailable
from kuberoll_workers.policy.outage import Outage

CHANGE_SECONDS: Final = 5.0
"""Minimum seconds between reports of different troubles."""
REPEAT_SECONDS: Final = 10.0
"""Seconds after which an unchanged trouble is reported again."""
_WATCH_SECONDS = 0.25

_Result = TypeVar("_Result")


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


def waiting_text(reason: str, left: float) -> str:
    """Text for the user who waits for an endpoint.

    Args:
        left: Seconds left until the wait is given up.
    """
    return f"waiting for the endpoint, {clock(max(0.0, left))} left: {reason}"


def answering_text(seconds: float) -> str:
    """Text for the user when an endpoint answers after `seconds` without an answer."""
    return f"the endpoint answers again, after {clock(seconds)}"


@dataclass(frozen=True, slots=True)
class OutageLimit:
    """The longest outage of a policy that is waited out.

    Attributes:
        seconds: Its duration.
        setting: The setting of the job that says so, for the message.
        trouble: Called while an outage lasts, with its reason and the seconds left, at once and from time to time; when
            it is over, with None and its duration.
    """

    seconds: float
    setting: str
    trouble: Callable[[str | None, float], None]


async def while_answering(outage: Callable[[], Outage | None], limit: OutageLimit, work: Awaitable[_Result]) -> _Result:
    """Await `work`, which needs the policy; it is cancelled if an outage lasts too long.

    Args:
        outage: Called for the present outage.

    Raises:
        PolicyUnavailable: It lasted too long; the message has the reason.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_watch(outage, limit))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return await working
    finally:
        working.cancel()
        watching.cancel()
        # Their results have been read or no longer matter.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _watch(outage: Callable[[], Outage | None], limit: OutageLimit) -> None:
    troubles: TroubleReports | None = None
    seconds = 0.0

    def report(reason: str) -> None:
        limit.trouble(reason, limit.seconds - seconds)

    while True:
        if (present := outage()) is not None:
            seconds = present.seconds
            if seconds >= limit.seconds:
                raise PolicyUnavailable(
                    f"the endpoint did not answer for {limit.seconds:g} s ({limit.setting}): {present.reason}"
                )
            troubles = troubles or TroubleReports(report)
            troubles.add(present.reason)
        elif troubles is not None:
            troubles = None
            limit.trouble(None, seconds)
        await asyncio.sleep(_WATCH_SECONDS)


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
