"""Ways to route and to admit that were tried against the real ones in replays, and that no worker uses."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

from kuberoll_workers.policy.routing.places import Places, ReplicaLoad
from kuberoll_workers.policy.routing.scheduler import Replica, RequestScheduler, Ticket
from kuberoll_workers.policy.routing.sessions import MoveCause, Session, SessionTable

Routing = Literal["Session", "LeastLoaded", "Hash", "Margin"]
"""`Session` and `LeastLoaded` are the workers' own; `Hash` is HAProxy's, of the session's id; with `Margin` a
trajectory of any length leaves its replica for one that has much less load."""

Admission = Literal["Learned", "Unlimited", "Resident", "Reserve"]
"""Which new trajectories a worker begins. `Learned` is the workers' own, see `CacheRoom`. `Unlimited`: all. `Resident`:
if the contexts of all trajectories, also of those in their environments, fit into the worker's share of a cache as they
are now. `Reserve`: besides, each counts as much as those that ended had on the average."""

_Load = TypeVar("_Load", bound=ReplicaLoad)


_SMOOTHING: Final = 0.02


class HashedSessions(SessionTable):
    """Assigns a trajectory by its name alone."""

    def choose(
        self,
        session_id: str,
        session: Session | None,
        places: Places[_Load],
        fits: Callable[[_Load], bool],
        *,
        most: int | None = None,
    ) -> _Load | None:
        """See `SessionTable`; what fits is of no interest to a hash."""
        del session, fits, most
        draw = zlib.crc32(session_id.encode())
        return max(places, key=lambda one: (one.rank(draw), one.id), default=None)


class CandidateScheduler(RequestScheduler):
    """A scheduler with one of the ways to route, and one of the ways to admit."""

    def __init__(
        self,
        *,
        routing: Routing,
        admission: Admission,
        margin: int,
        moved: Callable[[MoveCause], None],
        seed: int,
    ) -> None:
        """`margin` is the number of trajectories by which a load exceeds the least one, for `Margin`."""
        super().__init__(
            sticky=routing != "LeastLoaded",
            moved=moved,
            sessions=HashedSessions() if routing == "Hash" else None,
            seed=seed,
        )
        self._routing = routing
        self._margin = margin if routing == "Margin" else None
        self._way = admission
        # Mean length of those that ended; and where each trajectory is with how many tokens, with their sums.
        self._final = 0.0
        self._held: dict[Session, tuple[str, int]] = {}
        self._resident: Counter[str] = Counter()

    def _is_crowded(self, others: int, least: int, tokens: int) -> bool:
        if self._routing == "Hash":
            return False
        if self._margin is None:
            return super()._is_crowded(others, least, tokens)
        return others > least + self._margin

    def _has_room(self, replica: Replica, tokens: int) -> bool:
        capacity = replica.room.capacity
        if self._way == "Learned":
            return super()._has_room(replica, tokens)
        if self._way == "Unlimited" or not capacity or not replica.window.in_flight:
            return True
        if self._way == "Reserve" and (replica.sessions + 1) * self._final > capacity:
            return False
        return self._resident[replica.id] + tokens <= capacity

    def end_session(self, session_id: str) -> None:
        session = self.sessions.find(session_id)
        if session is not None and (held := self._held.pop(session, None)) is not None:
            home = session.replica
            self._resident[held[0]] -= held[1]
            self._final += (held[1] - self._final) * (_SMOOTHING if self._final else 1.0)
            super().end_session(session_id)
            self._note_change(home)
            self._dispatch_new(asyncio.get_running_loop().time())
            return
        super().end_session(session_id)

    def _begin(self, ticket: Ticket, session: Session, replica: Replica) -> None:
        self._hold(session, replica, ticket.tokens)
        super()._begin(ticket, session, replica)

    def record_answer(self, ticket: Ticket, tokens: int, now: float, **reported: Any) -> None:
        if ticket.session is not None and ticket.replica is not None:
            self._hold(ticket.session, ticket.replica, tokens)
        super().record_answer(ticket, tokens, now, **reported)

    def _hold(self, session: Session, replica: Replica, tokens: int) -> None:
        before = self._held.get(session)
        if before is not None:
            self._resident[before[0]] -= before[1]
        self._held[session] = replica.id, tokens
        self._resident[replica.id] += tokens
