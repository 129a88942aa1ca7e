"""Room for new trajectories in a replica's key-value cache, learned by additive increase, multiplicative decrease.

Contexts grow after a trajectory has begun. If those in flight fill the cache, each turn computes anew what another one
has evicted, and the replica gets slower the more it is given. That shows in its answers: of the turn before nothing was
cached any more.
"""

from __future__ import annotations

from typing import Final

_DECREASE: Final = 0.9
_INCREASE: Final = 0.01
_LEAST: Final = 0.05


class CacheRoom:
    """Tokens of requests in flight at one replica up to which it gets new trajectories.

    What waits for its environment does not count: its prefix may be evicted, which costs less than an idle replica.

    Attributes:
        capacity: Tokens of the cache for this process; 0: unknown, and no limit.
        limit: At most `capacity`.
        in_flight: Tokens of the prompts of the requests in flight.
    """

    __slots__ = ("_epoch", "_reuses", "capacity", "in_flight", "limit")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.limit = float(capacity)
        self.in_flight = 0
        self._epoch = 0
        # It has found a prefix; one that never does has no cache for them.
        self._reuses = False

    def fits(self, tokens: int) -> bool:
        """True if there is room for one more context."""
        return not self.capacity or self.in_flight + tokens <= self.limit

    def begin(self, tokens: int) -> int:
        """Begin a request; return the epoch to pass to `record_prefix`."""
        self.in_flight += tokens
        return self._epoch

    def end(self, tokens: int) -> None:
        """End a request, whatever its outcome."""
        self.in_flight -= tokens

    def record_prefix(self, epoch: int, *, known: int, cached: int, requests: int) -> None:
        """Record how much of a turn's prefix was still cached, before the request is ended.

        The limit shrinks if half of it was lost while requests filled half of the cache, once for all that were in
        flight together; else it grows, by a hundredth of the cache for each time that all have been answered.

        Args:
            epoch: What `begin` returned.
            known: Tokens that the replica had at the end of the turn before.
            cached: Tokens that it has found.
            requests: Number of requests in flight.
        """
        if 2 * cached >= known:
            self._reuses = True
            self.limit = min(self.capacity, self.limit + _INCREASE * self.capacity / max(1, requests))
        elif self._reuses and epoch == self._epoch and 2 * self.in_flight >= self.capacity:
            self._epoch += 1
            self.limit = max(_LEAST * self.capacity, _DECREASE * min(self.limit, self.in_flight))
