"""Bodies that arrive and calls that take places, counted by caller. Pure: nothing here waits or reads a clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

MAX_BODIES: Final = 4096
MAX_BYTES: Final = 512 << 20
"""Bounds of all bodies that one process holds for its callers."""

SHARE: Final = 8
"""Part of these that one session may have."""

LEAST_PLACES: Final = 4
"""Calls that each session may have under way, however many sessions call."""

MAX_WAITING: Final = 512
"""Calls of each session that may wait, unread: the server keeps 64 KiB and more of each."""

ACTIVE_SECONDS: Final = 10.0
"""Time after its last call for which a session counts as one that calls."""


class Arrival:
    """The body of one request.

    Attributes:
        size: Bytes that have arrived.
        counted: It is held; False: it has ended, or was dropped.
    """

    def __init__(self, caller: Caller, drop: Callable[[], None]) -> None:
        self.caller, self.drop = caller, drop
        self.size = 0
        self.counted = True


class Caller:
    """Bodies of one caller: those that are still arriving, the oldest first, and the size of all."""

    def __init__(self, name: str, *, bounded: bool) -> None:
        self.name, self.bounded = name, bounded
        self.arriving: OrderedDict[Arrival, None] = OrderedDict()
        self.bodies = self.size = 0


class Arrivals:
    """The bodies that a process holds: what is counted is exactly what is held, of each caller and of all.

    Where there are too many, or too much, the oldest body that is still arriving is dropped: of the caller that is
    beyond its own bound, or else of the one that holds most. One who sends slowly loses first, and a body that arrives
    as fast as the network carries it is never the oldest.
    """

    def __init__(self, *, bodies: int = MAX_BODIES, size: int = MAX_BYTES) -> None:
        self._most_bodies, self._most_bytes = bodies, size
        self._callers: dict[str, Caller] = {}
        self.bodies = self.size = 0

    def begin(self, caller: str, drop: Callable[[], None], *, bounded: bool) -> Arrival:
        """Count a body whose first byte is awaited.

        Args:
            caller: Name of the caller.
            drop: Called at most once, when it is to arrive no further.
            bounded: The caller may have only its share.
        """
        found = self._callers.get(caller)
        if found is None:
            found = self._callers[caller] = Caller(caller, bounded=bounded)
        arrival = Arrival(found, drop)
        found.arriving[arrival] = None
        found.bodies += 1
        self.bodies += 1
        self._make_room(found)
        return arrival

    def add(self, arrival: Arrival, size: int) -> None:
        """Count bytes that have arrived."""
        if arrival.counted:
            arrival.size += size
            arrival.caller.size += size
            self.size += size
            self._make_room(arrival.caller)

    def complete(self, arrival: Arrival) -> None:
        """Count a body as whole: it is not dropped any more."""
        arrival.caller.arriving.pop(arrival, None)

    def end(self, arrival: Arrival) -> None:
        """Count a body no more; one that was dropped is not counted already."""
        if not arrival.counted:
            return
        arrival.counted = False
        caller = arrival.caller
        self.complete(arrival)
        caller.bodies -= 1
        caller.size -= arrival.size
        self.bodies -= 1
        self.size -= arrival.size
        if not caller.bodies:
            del self._callers[caller.name]

    def _make_room(self, caller: Caller) -> None:
        while caller.bounded and (
            caller.bodies > max(1, self._most_bodies // SHARE) or caller.size > self._most_bytes // SHARE
        ):
            if not self._drop_oldest(caller):
                break
        while (more := self.size > self._most_bytes) or self.bodies > self._most_bodies:
            arriving = [found for found in self._callers.values() if found.arriving]
            if not arriving:
                break
            self._drop_oldest(max(arriving, key=(lambda found: found.size) if more else (lambda found: found.bodies)))

    def _drop_oldest(self, caller: Caller) -> bool:
        if not caller.arriving:
            return False
        arrival = next(iter(caller.arriving))
        self.end(arrival)
        arrival.drop()
        return True


class Calls:
    """Calls of sessions that are under way, so that one session leaves the others their part of the replica.

    A session may have as many calls under way as there are places for each session that calls, but always a few; its
    others wait, in their order. What other callers do is not limited here.

    Attributes:
        under_way: Number of calls under way, of all sessions.
        waiting: Number of calls that wait.
    """

    def __init__(self, places: int) -> None:
        """`places` is the number of calls that the replica works on at once."""
        self._places = places
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self.under_way = self.waiting = 0

    def share(self) -> int:
        """Number of calls that each session may have under way now."""
        return max(LEAST_PLACES, self._places // max(1, len(self._sessions)))

    def waiting_of(self, session: str) -> int:
        """Number of calls of a session that wait."""
        found = self._sessions.get(session)
        return 0 if found is None else len(found.waiting)

    def begin(self, session: str, now: float, start: Callable[[], None]) -> bool:
        """Begin a call; False: it waits, and `start` is called when it may begin.

        Args:
            now: Any clock's seconds.
        """
        self._forget(now)
        found = self._sessions.get(session)
        if found is None:
            found = self._sessions[session] = _Session()
        found.last = now
        self._sessions.move_to_end(session)
        if not found.waiting and found.under_way < self.share():
            found.under_way += 1
            self.under_way += 1
            return True
        found.waiting[start] = None
        self.waiting += 1
        return False

    def withdraw(self, session: str, start: Callable[[], None]) -> bool:
        """Withdraw a call that waits; False: it has begun."""
        found = self._sessions[session]
        if start not in found.waiting:
            return False
        del found.waiting[start]
        self.waiting -= 1
        return True

    def end(self, session: str) -> None:
        """End a call; those that wait may begin."""
        found = self._sessions[session]
        found.under_way -= 1
        self.under_way -= 1
        while found.waiting and found.under_way < self.share():
            start, _ = found.waiting.popitem(last=False)
            self.waiting -= 1
            found.under_way += 1
            self.under_way += 1
            start()

    def _forget(self, now: float) -> None:
        # Those that called last are at the end.
        for name, session in list(self._sessions.items()):
            if now - session.last < ACTIVE_SECONDS:
                return
            if not (session.under_way or session.waiting):
                del self._sessions[name]
            else:
                session.last = now
                self._sessions.move_to_end(name)


class _Session:
    def __init__(self) -> None:
        self.under_way = 0
        self.waiting: OrderedDict[Callable[[], None], None] = OrderedDict()
        self.last = 0.0
