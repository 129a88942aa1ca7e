"""A replica's circuit breaker: one that fails again and again is left alone until it has been seen to be well."""

from __future__ import annotations

from typing import Literal

State = Literal["closed", "open", "half-open"]

FAILURES = 3
FIRST_SECONDS = 0.5
LONGEST_SECONDS = 30.0


class Breaker:
    """Closed: requests go there. Open: none do. Half-open: none do, and one probe is under way.

    Attributes:
        retry_at: When an open one is to be probed.
    """

    __slots__ = ("_backoff", "_failures", "retry_at", "state")

    def __init__(self) -> None:
        self.state: State = "closed"
        self.retry_at = 0.0
        self._failures = 0
        self._backoff = FIRST_SECONDS

    @property
    def closed(self) -> bool:
        return self.state == "closed"

    def record_success(self) -> None:
        """A request was answered; one that was sent before the breaker opened says nothing of now."""
        if self.state == "closed":
            self._failures = 0
            self._backoff = FIRST_SECONDS

    def record_failure(self, now: float, *, fatally: bool = False) -> bool:
        """A request failed.

        Args:
            fatally: It is known to be down: there is no need for more failures.

        Returns:
            Whether the breaker opened by it.
        """
        if self.state != "closed":
            return False
        self._failures += 1
        if not fatally and self._failures < FAILURES:
            return False
        self._open(now)
        return True

    def begin_probe(self, now: float) -> bool:
        """Whether a probe is due; if so, the caller makes it, and says how it went."""
        if self.state != "open" or now < self.retry_at:
            return False
        self.state = "half-open"
        return True

    def record_probe(self, healthy: bool, now: float) -> None:
        """The probe's result."""
        if self.state != "half-open":
            return
        if healthy:
            # The backoff stays: health that is followed by failures is worth little.
            self.state = "closed"
            self._failures = 0
        else:
            self._open(now)

    def _open(self, now: float) -> None:
        self.state = "open"
        self.retry_at = now + self._backoff
        self._backoff = min(LONGEST_SECONDS, self._backoff * 2)
