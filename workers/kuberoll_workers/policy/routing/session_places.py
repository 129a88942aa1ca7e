"""Agents that wait until a replica has a place for their session. Pure: the time is an argument."""

from __future__ import annotations

import logging
from typing import Final

from kuberoll_workers.policy.client import SessionsFull
from kuberoll_workers.policy.outage import PATIENCE_SECONDS, Outage

FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 10.0

_LOG_SECONDS: Final = 60.0

_log = logging.getLogger(__name__)


class SessionPlaces:
    """The sessions of one process, and its agents that wait for a place for theirs.

    While some of its sessions are open, agents wait for the end of these, and get their places. Where none is, and none
    is to be had, it is an outage: all places are taken by others, perhaps by workers that are gone.

    Attributes:
        open: Number of open sessions.
        waiting: Number of agents that wait.
    """

    def __init__(self) -> None:
        self.open = self.waiting = 0
        self._reason = ""
        # Since when none is open though agents wait for one.
        self._since: float | None = None
        self._logged = float("-inf")

    def record_refusal(self, refusal: SessionsFull, now: float, *, tries: int) -> float:
        """Record that an agent got no place; returns the seconds until its next try.

        Args:
            tries: Number of times that it was refused before; the first time it begins to wait.
        """
        self.waiting += not tries
        self._reason = str(refusal)
        if not self.open and self._since is None:
            self._since = now
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            _log.warning(
                "%d agents wait for a place for their sessions, and %d play: %s", self.waiting, self.open, refusal
            )
        wish = refusal.retry_after or FIRST_PAUSE_SECONDS * 2.0 ** min(tries, 10)
        return min(wish, LONGEST_PAUSE_SECONDS)

    def record_end(self, *, opened: bool) -> None:
        """Record that an agent waits no more, because its session was opened or because it was stopped."""
        self.waiting -= 1
        if not self.waiting or opened:
            self._since = None

    def record_opening(self) -> None:
        """Record a session that was opened."""
        self.open += 1
        self._since = None

    def record_closing(self) -> None:
        """Record a session that was closed, or whose replica is gone."""
        self.open = max(0, self.open - 1)

    def outage(self, now: float) -> Outage | None:
        """The outage that agents wait for; None: there is none."""
        if self._since is None or now - self._since < PATIENCE_SECONDS:
            return None
        return Outage(self._reason, now - self._since)
