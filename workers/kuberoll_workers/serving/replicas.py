"""The list of a policy's replicas, for those who go to them directly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from kuberoll_workers.serving.controller import RunningReplica

_SECONDS = 1.0


def known_replicas(
    before: Mapping[str, RunningReplica], now: Iterable[RunningReplica], busy: Iterable[str]
) -> dict[str, RunningReplica]:
    """The replicas by id, in order: those that are listed, and those that were and are only busy.

    Args:
        before: The last list.
        now: What Serve lists.
        busy: Ids of those that Serve leaves out, though they take requests.
    """
    found = {replica.id: replica for replica in now}
    for known in busy:
        if known in before:
            found.setdefault(known, before[known])
    return dict(sorted(found.items()))


class ReplicaList:
    """Asks for the replicas when somebody wants to know, at most once a second."""

    def __init__(
        self,
        listed: Callable[[], Awaitable[list[RunningReplica]]],
        busy: Callable[[], Awaitable[Mapping[str, bool]]],
        *,
        seconds: float = _SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`busy` is asked only when one that was listed is not: which are there, and whether busy."""
        self._listed = listed
        self._busy = busy
        self._seconds = seconds
        self._clock = clock
        self._known: dict[str, RunningReplica] = {}
        self._read_at: float | None = None
        self._lock = asyncio.Lock()

    async def read(self) -> list[RunningReplica]:
        """The replicas, in the order of their ids."""
        async with self._lock:
            if self._read_at is None or self._clock() - self._read_at >= self._seconds:
                listed = await self._listed()
                missing = self._known.keys() - {replica.id for replica in listed}
                states = await self._busy() if missing else {}
                self._known = known_replicas(self._known, listed, [name for name, busy in states.items() if busy])
                self._read_at = self._clock()
        return list(self._known.values())
