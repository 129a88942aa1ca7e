"""Turns of jobs that the cluster has no room for: who was created first gets the room first.

Without this, the engines of many jobs take all of it, and no job has room for its workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from kuberoll_api import conditions
from kuberoll_api.conditions import Reason
from kuberoll_operator.model import Key, Object, condition

_NO_ROOM: Final = frozenset({Reason.UNSCHEDULABLE, Reason.QUOTA})


class _Waiter(NamedTuple):
    """A job without room for its pods.

    Attributes:
        created: The order of jobs: time of creation, then name.
        since: When it was first seen without room.
        holds: True if its engines are there, and only its workers have no room.
        begun: True if a worker ran since its engines were there: they are given back after `idle_engines_seconds`.
    """

    created: tuple[str, Key]
    since: datetime
    holds: bool
    begun: bool


class Turns:
    """The jobs without room, and those that step back for one of them.

    A job steps back, and holds nothing, while an older one has engines and no room for its workers: what it would
    hold is what the older one lacks. Whoever has a worker never does, nor who finds room. It tries again after some
    time, because what the two wait for may have nothing to do with each other.

    Args:
        seconds: How long a job must have been without room before others step back for it, or it does. An autoscaler
            of nodes needs some minutes.
    """

    def __init__(self, seconds: float) -> None:
        self._patience = timedelta(seconds=seconds)
        self._waiters: dict[Key, _Waiter] = {}
        self._back: dict[Key, datetime] = {}

    def note(self, key: Key, raw: Object, status: Mapping[str, Any], now: datetime) -> None:
        """Note what a job's status says now."""
        known = self._waiters.pop(key, None)
        if not _has_no_room(status):
            return
        generation, workers = _parts(status)
        holds = generation.get("status") == "True"
        begun = holds and str(workers.get("lastTransitionTime")) > str(generation.get("lastTransitionTime"))
        self._waiters[key] = _Waiter(_order(key, raw), now if known is None else known.since, holds, begun)

    def forget(self, key: Key) -> None:
        """Forget a job that has ended, or does not take part."""
        self._waiters.pop(key, None)
        self._back.pop(key, None)

    def first(self, key: Key, raw: Object, now: datetime) -> Key | None:
        """The older job for which a job steps back now; None if it goes on."""
        mine = _order(key, raw)
        older = [
            waiter.created
            for waiter in self._waiters.values()
            if waiter.holds and waiter.created < mine and now - waiter.since >= self._patience
        ]
        until, waiter = self._back.get(key), self._waiters.get(key)
        if not older:
            self._back.pop(key, None)
            return None
        if until is not None and now >= until:
            del self._back[key]
            self._waiters.pop(key, None)
            return None
        if until is None:
            if waiter is None or waiter.begun or now - waiter.since < self._patience:
                return None
            self._back[key] = now + 2 * self._patience
        return min(older)[1]


def _has_no_room(status: Mapping[str, Any]) -> bool:
    """True if a job that is to run has no worker, because the cluster has no room for its engines or its workers."""
    generation, workers = _parts(status)
    if status.get("phase") not in {"Starting", "Running"} or generation.get("reason") == Reason.EXTERNAL:
        return False
    part = workers if generation.get("status") == "True" else generation
    return workers.get("status") == "False" and part.get("status") == "False" and part.get("reason") in _NO_ROOM


def _parts(status: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return condition(status, conditions.GENERATION_READY), condition(status, conditions.WORKERS_READY)


def _order(key: Key, raw: Object) -> tuple[str, Key]:
    return str(raw["metadata"].get("creationTimestamp") or ""), key
