"""Which trajectory lives on which replica. Pure: nothing here waits, sends or looks at a clock.

The load of a replica is the number of our trajectories that live there, whether they are being answered or stepped, and
of the requests that others have there: a trajectory whose environment is thinking comes back in a moment. A replica
that is slow frees its places late and so gets fewer new ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Literal

MoveCause = Literal["gone", "broken", "failed", "overload"]
"""Why a trajectory left its replica: that is no longer listed, its breaker is open, it failed a request, it has or
takes so much less than the others."""

SHORT_CONTEXT_TOKENS = 1024
"""Moving a shorter context costs little; a longer one stays, whatever the load."""

_LARGEST = 1 << 16
_MASK = (1 << 32) - 1


class ReplicaLoad:
    """A replica as somewhere to live.

    Attributes:
        sessions: Our trajectories there.
        resident: Their tokens, as of their newest turns.
        outside: Requests that others have there, as last heard.
    """

    __slots__ = ("_seed", "id", "outside", "resident", "sessions")

    def __init__(self, name: str) -> None:
        self.id = name
        self.sessions = 0
        self.resident = 0
        self.outside = 0
        self._seed = zlib.crc32(name.encode()) * 0x9E3779B1 & _MASK

    @property
    def load(self) -> int:
        return self.sessions + self.outside

    def rank(self, draw: int) -> int:
        """Rendezvous hashing: who ranks highest for a draw stays highest when others come and go."""
        mixed = (draw ^ self._seed) * 0x85EBCA6B & _MASK
        return (mixed ^ (mixed >> 13)) * 0xC2B2AE35 & _MASK


class Session:
    """One trajectory.

    Attributes:
        replica: Where it lives; None while it has no home.
        tokens: Its context as of its newest turn.
        in_flight: Requests of it under way.
        deaths: How many replicas in a row died with a request of it in flight.
    """

    __slots__ = ("deaths", "group", "in_flight", "replica", "tokens")

    def __init__(self, group: str) -> None:
        self.group = group
        self.replica: ReplicaLoad | None = None
        self.tokens = 0
        self.in_flight = 0
        self.deaths = 0


class _Group:
    __slots__ = ("replica", "sessions")

    def __init__(self) -> None:
        self.replica: ReplicaLoad | None = None
        self.sessions = 0


def group_of(session_id: str) -> str:
    """The prompt group of a session's id, `<task>-<rollout>-<attempt>`: its task."""
    return session_id.partition("-")[0]


def acceptable_load(least: int) -> int:
    """The highest load that is still as good as the least one: what a shared prefix is worth."""
    return least + max(4, least // 4)


class SessionTable:
    """The trajectories that are alive.

    One that nobody ever says has ended is forgotten when it is among the oldest of 65,536.
    """

    def __init__(self, largest: int = _LARGEST) -> None:
        self._largest = largest
        self._sessions: dict[str, Session] = {}
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def add(self, session_id: str) -> Session:
        """Take a trajectory in; it has no home yet."""
        if len(self._sessions) >= self._largest:
            self._forget_one()
        session = self._sessions[session_id] = Session(group_of(session_id))
        self._groups.setdefault(session.group, _Group()).sessions += 1
        return session

    def assign(self, session: Session, replica: ReplicaLoad, tokens: int) -> None:
        """Give a trajectory a home, replacing the one it has."""
        self.unassign(session)
        session.replica = replica
        session.tokens = tokens
        replica.sessions += 1
        replica.resident += tokens
        self._groups[session.group].replica = replica

    def unassign(self, session: Session) -> None:
        """Take a trajectory's home from it."""
        replica = session.replica
        if replica is not None:
            replica.sessions -= 1
            replica.resident -= session.tokens
            session.replica = None

    def set_tokens(self, session: Session, tokens: int) -> None:
        """A trajectory's context has so many tokens now."""
        if session.replica is not None:
            session.replica.resident += tokens - session.tokens
            session.tokens = tokens

    def release(self, session_id: str) -> bool:
        """Forget a trajectory; whether it was known."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        self.unassign(session)
        group = self._groups[session.group]
        group.sessions -= 1
        if not group.sessions:
            del self._groups[session.group]
        return True

    def choose(self, session_id: str, session: Session | None, candidates: Iterable[ReplicaLoad]) -> ReplicaLoad | None:
        """The best new home among candidates; None if there are none.

        Where the newest of its prompt group lives, unless another has much less to do; else the least loaded. Of those
        with the same load each prompt group has an order of its own, so that workers that know nothing of each other
        do not all begin with the same one.
        """
        found = list(candidates)
        if not found:
            return None
        if len(found) == 1:
            return found[0]
        name = session.group if session is not None else group_of(session_id)
        least = min([replica.load for replica in found])
        group = self._groups.get(name)
        if (
            group is not None
            and group.replica in found
            and group.replica is not None
            and group.replica.load <= acceptable_load(least)
        ):
            return group.replica
        tied = [replica for replica in found if replica.load == least]
        if len(tied) == 1:
            return tied[0]
        draw = zlib.crc32(name.encode())
        return max(tied, key=lambda replica: (replica.rank(draw), replica.id))

    def _forget_one(self) -> None:
        for session_id, session in self._sessions.items():
            if not session.in_flight:
                self.release(session_id)
                return
