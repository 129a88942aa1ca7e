"""Replicas by their load: the least loaded one that fits is found without a look at all of them. Pure.

The load of a replica is the number of our trajectories assigned to it, whether they wait for generation or for their
environment, and of requests of other workers there: a trajectory in its environment returns soon. A slow replica
finishes trajectories later and so gets fewer new ones.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

RANKED: Final = 16
"""Equally loaded replicas that are ranked for a draw; of more, those that follow it on a ring."""

_MASK = (1 << 32) - 1


class ReplicaLoad:
    """The load of a replica.

    Attributes:
        load: Number of our trajectories assigned to it, and of requests of other workers there.
        resident: Tokens of these trajectories, as of their newest turns.
    """

    __slots__ = ("_outside", "_places", "_seed", "_sessions", "id", "load", "resident")

    def __init__(self, name: str) -> None:
        self.id = name
        self.load = 0
        self.resident = 0
        self._sessions = 0
        self._outside = 0
        self._seed = zlib.crc32(name.encode()) * 0x9E3779B1 & _MASK
        self._places: Places[Any] | None = None

    @property
    def sessions(self) -> int:
        """Number of our trajectories assigned to it."""
        return self._sessions

    @sessions.setter
    def sessions(self, sessions: int) -> None:
        self._sessions = sessions
        self._update()

    @property
    def outside(self) -> int:
        """Requests of other workers there, as last reported."""
        return self._outside

    @outside.setter
    def outside(self, outside: int) -> None:
        if outside != self._outside:
            self._outside = outside
            self._update()

    def _update(self) -> None:
        places = self._places
        if places is None:
            self.load = self._sessions + self._outside
        else:
            places._take_out(self)
            self.load = self._sessions + self._outside
            places._put_in(self)

    def rank(self, draw: int) -> int:
        """Rank by rendezvous hashing: the replica that ranks highest for a draw stays so when others come and go."""
        mixed = (draw ^ self._seed) * 0x85EBCA6B & _MASK
        return (mixed ^ (mixed >> 13)) * 0xC2B2AE35 & _MASK


_Load = TypeVar("_Load", bound=ReplicaLoad)


class Places(Generic[_Load]):
    """Replicas to choose from, each in one `Places` at most.

    A change of a load, and a choice, take a time that hardly grows with the number of replicas, unless most of the
    least loaded ones do not fit.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Load] = {}
        # The loads that occur, ascending; of each, its replicas on a ring.
        self._loads: list[int] = []
        self._rings: dict[int, list[tuple[int, str, _Load]]] = {}

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[_Load]:
        return iter(self._replicas.values())

    def find(self, replica: ReplicaLoad) -> _Load | None:
        """The same replica, if it is one of these."""
        found = self._replicas.get(replica.id)
        return found if found is replica else None

    def add(self, replica: _Load) -> None:
        """Add a replica; does nothing if it is one of these."""
        if replica._places is None:
            self._replicas[replica.id] = replica
            replica._places = self
            self._put_in(replica)

    def remove(self, replica: _Load) -> None:
        """Remove a replica; does nothing if it is none of these."""
        if replica._places is self:
            del self._replicas[replica.id]
            replica._places = None
            self._take_out(replica)

    def least_load(self, fits: Callable[[_Load], bool], most: int | None = None) -> int | None:
        """Lowest load of a replica that fits; None: there is none, or none with at most the load `most`."""
        for load in self._loads:
            if most is not None and load > most:
                return None
            for _, _, replica in self._rings[load]:
                if fits(replica):
                    return load
        return None

    def ranked_first(self, load: int, draw: int, fits: Callable[[_Load], bool]) -> _Load | None:
        """Of the replicas with this load that fit, the one that ranks highest for a draw; of many, nearly so."""
        ring = self._rings.get(load, [])
        start = bisect_left(ring, (draw,)) if len(ring) > RANKED else 0
        best: tuple[int, str] | None = None
        chosen: _Load | None = None
        ranked = 0
        for step in range(len(ring)):
            _, name, replica = ring[start + step - (len(ring) if start + step >= len(ring) else 0)]
            if fits(replica):
                if best is None or (replica.rank(draw), name) > best:
                    best, chosen = (replica.rank(draw), name), replica
                ranked += 1
                if ranked == RANKED:
                    break
        return chosen

    def _put_in(self, replica: _Load) -> None:
        ring = self._rings.get(replica.load)
        if ring is None:
            ring = self._rings[replica.load] = []
            insort(self._loads, replica.load)
        insort(ring, (replica._seed, replica.id, replica))

    def _take_out(self, replica: _Load) -> None:
        ring = self._rings[replica.load]
        del ring[bisect_left(ring, (replica._seed, replica.id, replica))]
        if not ring:
            del self._rings[replica.load]
            del self._loads[bisect_left(self._loads, replica.load)]
