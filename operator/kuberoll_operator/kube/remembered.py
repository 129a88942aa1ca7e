"""Reads of objects that hardly ever change, remembered for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.resources import Resource
from kuberoll_operator.model import Object


class RememberingReader:
    """Reads objects, and remembers those that exist.

    Args:
        seconds: Time after which an object is read again.
    """

    def __init__(self, client: Client, *, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._seconds, self._clock = client, seconds, clock
        self._known: dict[tuple[Resource, str | None, str], tuple[float, Object]] = {}

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """An object; None if it does not exist, which is not remembered: jobs wait for it.

        Args:
            namespace: None for cluster-scoped kinds.

        Raises:
            ApiError: It could not be read.
        """
        now = self._clock()
        self._known = {place: item for place, item in self._known.items() if now - item[0] < self._seconds}
        place = (resource, namespace, name)
        if (known := self._known.get(place)) is not None:
            return known[1]
        found = await self._client.get(resource, namespace, name)
        if found is not None:
            self._known[place] = now, found
        return found
