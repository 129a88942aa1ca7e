"""Deaths of replicas, and whether a trajectory is to blame for them. Pure: the time is an argument.

A request that kills engines was in flight at each of the deaths; so may a long response have been that did nothing, if
replicas die by themselves. What tells the two apart are the replicas that died without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kuberoll_workers.policy.routing.sessions import Session

SUSPICIOUS_DEATHS: Final = 2
"""Engines that died in a row with a trajectory's request in flight before it is suspected of killing them."""
MOST_DEATHS: Final = 4
"""Deaths in a row after which a suspect is to blame, however many replicas died without it."""
REMEMBERED_SECONDS: Final = 600.0


class DeathLog:
    """Replicas that died lately, each with the trajectories that had a request in flight there."""

    def __init__(self) -> None:
        self._deaths: dict[str, tuple[float, frozenset[Session]]] = {}

    def record_departure(self, replica: str, flying: Iterable[Session], now: float) -> None:
        """Record that a replica has left the list, as one does that died; where its death is known, that counts."""
        if replica not in self._deaths:
            self.record(replica, flying, now)

    def record(self, replica: str, flying: Iterable[Session], now: float) -> None:
        """Record the death of a replica; its newest one counts."""
        self._deaths = {name: death for name, death in self._deaths.items() if now - death[0] <= REMEMBERED_SECONDS}
        self._deaths[replica] = now, frozenset(flying)

    def needed(self, session: Session, now: float) -> int:
        """Deaths in a row after which a trajectory is to blame: one more for each replica that died without it."""
        without = sum(session not in flying for at, flying in self._deaths.values() if now - at <= REMEMBERED_SECONDS)
        return min(MOST_DEATHS, SUSPICIOUS_DEATHS + without)

    def explain(self, session: Session) -> None:
        """Forget the deaths for which a trajectory is to blame: they are no reason to think that replicas just die."""
        self._deaths = {name: death for name, death in self._deaths.items() if session not in death[1]}
