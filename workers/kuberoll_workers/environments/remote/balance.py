"""Choice of the server for a call: the least loaded one, and not one that has just been lost or busy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

FIRST_SECONDS: Final = 0.5
"""First rest of a server."""
LONGEST_SECONDS: Final = 60.0


class Rest:
    """Pause of a server that was lost or busy: others are preferred meanwhile, though it has no calls.

    Each rest is twice as long as the one before, until the server has answered a call after one.

    Attributes:
        until: Time at which the last rest ends.
        count: Number of rests since a call was answered.
        last: Time of the last trouble, also during a rest.
    """

    __slots__ = ("count", "last", "until")

    def __init__(self) -> None:
        self.until = 0.0
        self.count = 0
        self.last = 0.0

    def lasts(self, now: float) -> bool:
        """True while the server rests."""
        return now < self.until

    def begin(self, now: float) -> None:
        """Begin a rest; what fails during one makes it no longer."""
        self.last = now
        if not self.lasts(now):
            self.until = now + min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(self.count, 32))
            self.count += 1

    def record_answer(self, now: float) -> None:
        """A call was answered; ignored during a rest, since it may have been sent before."""
        if not self.lasts(now):
            self.count = 0


class Resting(Protocol):
    """A server as the choice sees it."""

    @property
    def parallel(self) -> int: ...

    @property
    def rest(self) -> Rest: ...


_Server = TypeVar("_Server", bound=Resting)


def least(servers: Iterable[_Server], load: Callable[[_Server], float], now: float) -> _Server:
    """The server with the least load for what it can do at a time, of those that do not rest.

    If all rest, of those that have rested least often, in turns: a call never waits for the end of a rest.
    """

    def cost(one: _Server) -> tuple[float, ...]:
        resting = one.rest.lasts(now)
        return one.rest.count if resting else 0, load(one) / one.parallel, one.rest.last if resting else 0.0

    return min(servers, key=cost)
