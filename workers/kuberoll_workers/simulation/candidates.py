"""Ways to route and to admit that were tried against the real ones in replays, and that no worker uses."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final, Literal, TypeVar

from kuberoll_workers.policy.routing.places import Places, ReplicaLoad
from kuberoll_workers.policy.routing.scheduler import Replica, RequestScheduler
from kuberoll_workers.policy.routing.sessions import MoveCause, Session, SessionTable

Routing = Literal["Session", "LeastLoaded", "Hash", "Margin"]
"""`Session` and `LeastLoaded` are the workers' own; `Hash` is HAProxy's, of the session's id; with `Margin` a
trajectory of any length leaves its replica for one that has much less load."""

Admission = Literal["Resident", "Unlimited", "Reserve"]
"""Which new trajectories a worker begins. `Resident` is the workers' own: if the contexts of all trajectories, also of
those in their environments, fit into the worker's share of a cache as they are now. `Unlimited`: all. `Reserve`:
besides, each counts as much as those that ended had on the average."""

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
        # Mean length of those that ended.
        self._final = 0.0

    def _is_crowded(self, others: int, least: int, tokens: int) -> bool:
        if self._routing == "Hash":
            return False
        if self._margin is None:
            return super()._is_crowded(others, least, tokens)
        return others > least + self._margin

    def _has_room(self, replica: Replica, tokens: int) -> bool:
        if self._way == "Unlimited" or not replica.budget or not replica.window.in_flight:
            return True
        if self._way == "Reserve" and (replica.sessions + 1) * self._final > replica.budget:
            return False
        return super()._has_room(replica, tokens)

    def end_session(self, session_id: str, now: float) -> None:
        session = self.sessions.find(session_id)
        if session is not None:
            self._final += (session.tokens - self._final) * (_SMOOTHING if self._final else 1.0)
        super().end_session(session_id, now)
