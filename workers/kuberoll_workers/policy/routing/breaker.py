"""Circuit breaker of a replica: after repeated failures it gets no requests until a health probe succeeds."""

from __future__ import annotations

from typing import Literal

State = Literal["closed", "open", "half-open"]

FAILURES = 3
FIRST_SECONDS = 0.5
LONGEST_SECONDS = 30.0


class Breaker:
    """Closed: requests are sent. Open: none are. Half-open: none are, and one probe is running.

    Attributes:
        retry_at: Time at which an open breaker is probed.
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
        """Record a response; ignored while open, since the request was sent before the breaker opened."""
        if self.state == "closed":
            self._failures = 0
            self._backoff = FIRST_SECONDS

    def record_failure(self, now: float, *, fatally: bool = False) -> bool:
        """Record a failed request.

        Args:
            fatally: The replica is known to be down: open at once.

        Returns:
            True if this opened the breaker.
        """
        if self.state != "closed":
            return False
        self._failures += 1
        if not fatally and self._failures < FAILURES:
            return False
        self._open(now)
        return True

    def begin_probe(self, now: float) -> bool:
        """True if a probe is due; the caller then makes it and calls `record_probe`."""
        if self.state != "open" or now < self.retry_at:
            return False
        self.state = "half-open"
        return True

    def record_probe(self, healthy: bool, now: float) -> None:
        """Record the probe's result."""
        if self.state != "half-open":
            return
        if healthy:
            # The backoff stays until a request succeeds: a healthy replica may still fail requests.
            self.state = "closed"
            self._failures = 0
        else:
            self._open(now)

    def _open(self, now: float) -> None:
        self.state = "open"
        self.retry_at = now + self._backoff
        self._backoff = min(LONGEST_SECONDS, self._backoff * 2)
