"""The pace of a rollout that a trainer consumes: which prompt groups may begin, and which are too old."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kuberoll_workers.data.intervals import IntervalSet
from kuberoll_workers.data.messages import Message


def oldest_version(messages: Iterable[Message]) -> int | None:
    """The lowest version of the weights that sampled a token of these messages.

    Returns:
        None if nothing was sampled, or if a version is not a whole number.
    """
    found = [version for message in messages for version, *_ in message.policy_versions or ()]
    return min(map(int, found)) if found and all(map(str.isdecimal, found)) else None


class Pace:
    """What the consumer of a run allows one shard.

    Groups are numbered in the order in which the shard begins them. One may begin if fewer groups before it than there
    is room for are not settled: neither taken by the consumer, nor given up. One that is settled itself may begin, too:
    it has failed, a resumed run tries it again, and nobody would make room for it.

    Attributes:
        version: Number of the newest weights.
        max_lag: Maximum number of versions between a token and the newest weights; None: any.
        stopped: True if the consumer needs no more groups.
        reason: Why nothing may begin before there is a plan.
    """

    def __init__(self, *, max_lag: int | None, held: bool) -> None:
        """
        Args:
            max_lag: None: no trajectory is stopped because it is too old.
            held: True if nothing begins before the consumer has said how much may.
        """
        self.max_lag = max_lag
        self.version = 0
        self.stopped = False
        self._room: int | None = 0 if held else None
        self._settled = IntervalSet()
        self._changed = asyncio.Event()

    def may_begin(self, order: int) -> bool:
        """True if the group of this number may begin now."""
        if self._room is None or order in self._settled:
            return True
        return order - self._settled.count_below(order) < self._room

    def update(self, *, version: int, room: int | None, settled: IntervalSet, stopped: bool) -> None:
        """Take over what the consumer allows.

        Args:
            room: Number of groups that may have begun and not be settled; None: any.
            settled: Numbers of the groups that are settled.
        """
        self.version, self._room, self._settled = version, room, settled
        self.stopped = self.stopped or stopped
        self._changed.set()
        self._changed = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """The event that is set at the next `update`, counted from this call."""
        return self._changed

    def is_stale(self, oldest: int | None) -> bool:
        """True if a trajectory whose oldest token is of this version is too old to be delivered."""
        return self.max_lag is not None and oldest is not None and self.version - oldest > self.max_lag
