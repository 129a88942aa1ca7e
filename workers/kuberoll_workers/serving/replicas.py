"""The list of a policy's replicas, for clients that connect to them directly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from kuberoll_workers.serving.controller import RunningReplica

_SECONDS = 1.0


def known_replicas(
    before: Mapping[str, RunningReplica], now: Iterable[RunningReplica], busy: Iterable[str]
) -> dict[str, RunningReplica]:
    """The replicas by id, sorted: those that are listed, and those of the last list that are only busy.

    Args:
        before: The last list.
        now: The replicas that Serve lists.
        busy: Ids of replicas that Serve leaves out, although they take requests.
    """
    replicas = {replica.id: replica for replica in now}
    for replica_id in busy:
        if replica_id in before:
            replicas.setdefault(replica_id, before[replica_id])
    return dict(sorted(replicas.items()))


class ReplicaList:
    """The list of replicas, read on demand and cached for a second."""

    def __init__(
        self,
        listed: Callable[[], Awaitable[list[RunningReplica]]],
        busy: Callable[[], Awaitable[Mapping[str, bool]]],
        *,
        seconds: float = _SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`listed` reads the list; `busy` maps running replicas to whether they are busy.

        `busy` is called only when a replica of the last list is missing.
        """
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
