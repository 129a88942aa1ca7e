"""How many of our requests a replica takes at once: learned by additive increase, multiplicative decrease."""

from __future__ import annotations

import random

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_LONGEST_WISH_SECONDS = 30.0


class Window:
    """The requests in flight at one replica, and how many there may be.

    Attributes:
        limit: At least 1.
        in_flight: Begun and not yet ended; more than `limit` only after it fell.
        refusals: Overload answers since the last success.
    """

    __slots__ = ("_epoch", "_largest", "_successes", "in_flight", "limit", "refusals", "resume_at")

    def __init__(self, largest: int) -> None:
        """`largest` bounds the limit, and is where it begins: most replicas take what they are given."""
        self._largest = max(1, largest)
        self.limit = self._largest
        self.in_flight = 0
        self.refusals = 0
        self.resume_at = 0.0
        self._successes = 0
        self._epoch = 0

    def set_maximum(self, largest: int) -> None:
        """What the replica itself says that it takes."""
        at_bound = self.limit == self._largest
        self._largest = max(1, largest)
        self.limit = self._largest if at_bound else min(self.limit, self._largest)

    @property
    def room(self) -> bool:
        return self.in_flight < self.limit

    def begin(self) -> int:
        """Begin a request; what it returns is to be given back with an overload."""
        self.in_flight += 1
        return self._epoch

    def end(self) -> None:
        """A request ended, however it did."""
        self.in_flight -= 1

    def record_success(self) -> None:
        """A request was answered: one more for each window of them."""
        self.refusals = 0
        if self.limit < self._largest:
            self._successes += 1
            if self._successes >= self.limit:
                self.limit += 1
                self._successes = 0

    def record_overload(self, epoch: int, now: float, *, retry_after: float | None, draw: random.Random) -> float:
        """A request was refused: half the window, once for all that were in flight together.

        Args:
            epoch: What `begin` returned.
            retry_after: What the replica asked for, seconds.

        Returns:
            For how long to send it nothing, seconds.
        """
        if epoch == self._epoch:
            self._epoch += 1
            self._successes = 0
            self.limit = max(1, self.limit // 2)
            self.refusals += 1
        pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(self.refusals - 1, 20))
        wish = min(_LONGEST_WISH_SECONDS, retry_after or 0.0)
        # The jitter keeps workers that were refused together from coming back together.
        pause = max(wish, pause) * draw.uniform(1.0, 1.5)
        self.resume_at = max(self.resume_at, now + pause)
        return pause
