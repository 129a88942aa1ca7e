"""Number of requests that a replica takes at once, learned by additive increase and multiplicative decrease."""

from __future__ import annotations

import random

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_LONGEST_RETRY_AFTER_SECONDS = 30.0


class Window:
    """Limit on the requests in flight at one replica.

    Attributes:
        limit: At least 1.
        in_flight: Requests in flight; more than `limit` only after it was lowered.
        refusals: Overload responses since the last success.
        resume_at: Time before which no request is sent.
    """

    __slots__ = ("_epoch", "_largest", "_successes", "in_flight", "limit", "refusals", "resume_at")

    def __init__(self, largest: int) -> None:
        """`largest` is the maximum and the initial value of the limit: most replicas take all requests."""
        self._largest = max(1, largest)
        self.limit = self._largest
        self.in_flight = 0
        self.refusals = 0
        self.resume_at = 0.0
        self._successes = 0
        self._epoch = 0

    def set_maximum(self, largest: int) -> None:
        """Set the maximum to what the replica reports."""
        at_bound = self.limit == self._largest
        self._largest = max(1, largest)
        self.limit = self._largest if at_bound else min(self.limit, self._largest)

    @property
    def room(self) -> bool:
        return self.in_flight < self.limit

    def begin(self) -> int:
        """Begin a request; return the epoch to pass to `record_overload`."""
        self.in_flight += 1
        return self._epoch

    def end(self) -> None:
        """End a request, whatever its outcome."""
        self.in_flight -= 1

    def record_success(self) -> None:
        """Record a response; the limit grows by one for each full window of them."""
        self.refusals = 0
        if self.limit < self._largest:
            self._successes += 1
            if self._successes >= self.limit:
                self.limit += 1
                self._successes = 0

    def record_overload(self, epoch: int, now: float, *, retry_after: float | None, draw: random.Random) -> float:
        """Record an overload; halves the limit, once for all requests that were in flight together.

        Args:
            epoch: What `begin` returned.
            retry_after: Seconds that the replica asked for.

        Returns:
            Seconds for which to send it no requests.
        """
        if epoch == self._epoch:
            self._epoch += 1
            self._successes = 0
            self.limit = max(1, self.limit // 2)
            self.refusals += 1
        pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(self.refusals - 1, 20))
        requested = min(_LONGEST_RETRY_AFTER_SECONDS, retry_after or 0.0)
        # The jitter keeps workers that were refused together from retrying together.
        pause = max(requested, pause) * draw.uniform(1.0, 1.5)
        self.resume_at = max(self.resume_at, now + pause)
        return pause
