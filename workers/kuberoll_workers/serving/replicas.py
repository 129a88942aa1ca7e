"""The list of a policy's replicas, for those who go to them directly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from kuberoll_workers.serving.controller import Replica

_SECONDS = 1.0


def still_there(before: Mapping[str, Replica], now: Iterable[Replica], busy: Iterable[str]) -> dict[str, Replica]:
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
        listed: Callable[[], Awaitable[list[Replica]]],
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
        self._known: dict[str, Replica] = {}
        self._asked: float | None = None
        self._one_at_a_time = asyncio.Lock()

    async def read(self) -> list[Replica]:
        """The replicas, in the order of their ids."""
        async with self._one_at_a_time:
            if self._asked is None or self._clock() - self._asked >= self._seconds:
                listed = await self._listed()
                missing = self._known.keys() - {replica.id for replica in listed}
                states = await self._busy() if missing else {}
                self._known = still_there(self._known, listed, [name for name, busy in states.items() if busy])
                self._asked = self._clock()
        return list(self._known.values())
