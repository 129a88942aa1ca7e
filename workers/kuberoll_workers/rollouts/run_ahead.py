"""The bound on how far a rollout runs ahead of its reader."""

from __future__ import annotations

import asyncio
import math


class RunAhead:
    """Counts the trajectories that have been started and not read: in flight, or ended and waiting to be read.

    At most `limit` of them exist at once, with one exception: a prompt group is read as a whole, so the samples of a
    group larger than `limit` are started nevertheless, once the results of all other groups have been read.

    Attributes:
        limit: Maximum number of trajectories; infinite if nobody reads the results.
        unread: Number of trajectories that have been started and not read.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.unread = 0
        self._read = asyncio.Event()

    def has_room(self, *, of_group: int, wanted: int = 1) -> bool:
        """True if more trajectories may be started.

        Args:
            of_group: Number of unread trajectories that belong to the group of the next sample.
            wanted: Number of trajectories to start together.
        """
        return self.unread + wanted <= self.limit or self.unread <= of_group

    def start(self) -> None:
        """Count a trajectory that is started."""
        self.unread += 1

    def read(self, count: int = 1) -> None:
        """Count trajectories whose results have been read."""
        self.unread -= count
        self._read.set()
        self._read = asyncio.Event()

    def next_read(self) -> asyncio.Event:
        """The event that is set when further results are read, counted from this call."""
        return self._read
