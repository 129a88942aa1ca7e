"""The time of a replica that sessions spend, judged by what they send. Pure: nothing here waits or reads a clock."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kuberoll_workers.serving.arrivals import ACTIVE_SECONDS

CALL_SECONDS: Final = 1e-3
"""Time of a replica's interpreter that a request takes, whatever is in it."""

BYTE_SECONDS: Final = 150e-9
"""Time that a byte of a body takes at most, to be read, parsed and checked: that of a list of token ids, measured by
benchmarks/hostile_session.py. A byte of text takes a twentieth of it, before it is tokenized."""

REPORT_SECONDS: Final = 10.0
"""Least time between two lines in the log about sessions that wait."""

LEAST_SHARE: Final = 0.05
"""Part of a replica's time that a session may always spend, however many others spend."""

SAVED_SECONDS: Final = 1.0
"""Time that a session may have saved, and spend at once."""


class Spending:
    """What sessions have spent, so that what one sends costs the others no more than its part of the replica's time.

    A session has the same part of each second as every other that spends, but always a twentieth. One that has spent
    more waits until it has the time again; beside nobody else it never waits. What is begun is begun whole, so that it
    can take more than what was there.
    """

    def __init__(self) -> None:
        # Seconds that each has, and when that was; who spent last is at the end.
        self._sessions: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._reported = -REPORT_SECONDS

    def share(self) -> float:
        """Part of the replica's time that each session may spend now."""
        return max(LEAST_SHARE, 1 / max(1, len(self._sessions)))

    def others(self, session: str) -> int:
        """Number of other sessions that spend."""
        return len(self._sessions) - (session in self._sessions)

    def delay(self, session: str, now: float) -> float:
        """Seconds until a session may spend again; 0: it may now.

        Args:
            now: Any clock's seconds.
        """
        self._forget(now)
        if not self.others(session):
            return 0.0
        return max(0.0, -self._balance(session, now)) / self.share()

    def spend(self, session: str, seconds: float, now: float) -> None:
        """Count time that a session spends."""
        self._forget(now)
        balance = SAVED_SECONDS if not self.others(session) else self._balance(session, now)
        self._sessions[session] = (balance - seconds, now)
        self._sessions.move_to_end(session)

    def report(self, now: float) -> bool:
        """Record that the log says that a session waits; False: it has said so a moment ago, and says nothing now."""
        if now - self._reported < REPORT_SECONDS:
            return False
        self._reported = now
        return True

    def _balance(self, session: str, now: float) -> float:
        balance, then = self._sessions.get(session, (SAVED_SECONDS, now))
        return min(SAVED_SECONDS, balance + (now - then) * self.share())

    def _forget(self, now: float) -> None:
        """Forget those that have not spent for a while and have saved what they may."""
        gone = []
        for name, (_, then) in self._sessions.items():
            if now - then < ACTIVE_SECONDS:
                break
            if self._balance(name, now) >= SAVED_SECONDS:
                gone.append(name)
        for name in gone:
            del self._sessions[name]


def body_seconds(size: int) -> float:
    """Time that so many bytes of a body take."""
    return size * BYTE_SECONDS
