"""Assignment of trajectories to replicas. Pure: nothing here waits, sends or reads a clock."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Literal, TypeVar

from kuberoll_workers.policy.routing.places import Places, ReplicaLoad

_Load = TypeVar("_Load", bound=ReplicaLoad)

MoveCause = Literal["gone", "broken", "failed", "overload"]
"""Reason for a move to another replica: the old one is no longer listed, its breaker is open, it failed a request, or
its load is much higher than that of others."""

SHORT_CONTEXT_TOKENS = 1024
"""Contexts shorter than this are cheap to move; longer ones stay, unless the load is a multiple of others'."""

_LARGEST = 1 << 16


class Session:
    """One trajectory.

    Attributes:
        replica: The replica that it is assigned to; None: none.
        tokens: Length of its context as of its newest turn.
        in_flight: Number of its requests in flight.
        deaths: Number of replicas in a row that died with one of its requests in flight.
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
    """Highest load at which a shared prefix outweighs the least loaded replica."""
    return least + max(4, least // 4)


def crowded_load(least: int) -> int:
    """Highest load at which the prefix of a long context outweighs the least loaded replica.

    It is exceeded where many replicas have lost their trajectories, or new ones have come.
    """
    return 2 * least + 16


class SessionTable:
    """The active trajectories.

    With more than 65,536 of them, the oldest without a request in flight is forgotten.
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
        """Add a trajectory, not yet assigned to a replica."""
        if len(self._sessions) >= self._largest:
            self._forget_one()
        session = self._sessions[session_id] = Session(group_of(session_id))
        self._groups.setdefault(session.group, _Group()).sessions += 1
        return session

    def assign(self, session: Session, replica: ReplicaLoad, tokens: int) -> None:
        """Assign a trajectory to a replica, replacing its present one."""
        self.unassign(session)
        session.replica = replica
        session.tokens = tokens
        replica.sessions += 1
        replica.resident += tokens
        self._groups[session.group].replica = replica

    def unassign(self, session: Session) -> None:
        """Remove a trajectory from its replica."""
        replica = session.replica
        if replica is not None:
            replica.sessions -= 1
            replica.resident -= session.tokens
            session.replica = None

    def set_tokens(self, session: Session, tokens: int) -> None:
        """Set the length of a trajectory's context."""
        if session.replica is not None:
            session.replica.resident += tokens - session.tokens
            session.tokens = tokens

    def release(self, session_id: str) -> bool:
        """Forget a trajectory; True if it was known."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        self.unassign(session)
        group = self._groups[session.group]
        group.sessions -= 1
        if not group.sessions:
            del self._groups[session.group]
        return True

    def choose(
        self,
        session_id: str,
        session: Session | None,
        places: Places[_Load],
        fits: Callable[[_Load], bool],
        *,
        most: int | None = None,
    ) -> _Load | None:
        """Choose a replica for a trajectory; None if none fits.

        It is the replica of the newest trajectory of the prompt group, unless another one has much less load; else the
        least loaded one. Ties are broken by prompt group, so that independent workers do not all choose the same one.

        Args:
            most: Highest load of a replica that may be chosen; None: any.
        """
        least = places.least_load(fits, most)
        if least is None:
            return None
        name = session.group if session is not None else group_of(session_id)
        group = self._groups.get(name)
        if group is not None and group.replica is not None:
            kept = places.find(group.replica)
            highest = acceptable_load(least) if most is None else min(most, acceptable_load(least))
            if kept is not None and kept.load <= highest and fits(kept):
                return kept
        return places.ranked_first(least, zlib.crc32(name.encode()), fits)

    def _forget_one(self) -> None:
        for session_id, session in self._sessions.items():
            if not session.in_flight:
                self.release(session_id)
                return
