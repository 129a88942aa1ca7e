"""Cluster-wide objects that Workloads refer to, read when needed and cached for a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.resources import RESOURCE_FLAVORS, WORKLOAD_PRIORITY_CLASSES, Resource
from kuberoll_operator.model import ClusterQuota, Object

REMEMBER_SECONDS: Final = 60.0


class QuotaReader:
    """Reads ResourceFlavors and WorkloadPriorityClasses, which hardly ever change."""

    def __init__(self, client: Client, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._known: dict[tuple[Resource, str], tuple[float, Object]] = {}

    async def read(self, flavors: Iterable[str], priority_class: str | None) -> ClusterQuota:
        """These flavors, and the value of this priority class.

        Raises:
            ApiError: They could not be read.
        """
        found = {name: await self._get(RESOURCE_FLAVORS, name) for name in sorted(flavors)}
        priority = None if priority_class is None else await self._get(WORKLOAD_PRIORITY_CLASSES, priority_class)
        return ClusterQuota(
            flavors={name: item.get("spec") or {} for name, item in found.items() if item is not None},
            priority=None if priority is None else int(priority.get("value", 0)),
        )

    async def _get(self, resource: Resource, name: str) -> Object | None:
        known = self._known.get((resource, name))
        if known is not None and self._clock() - known[0] < REMEMBER_SECONDS:
            return known[1]
        found = await self._client.get(resource, None, name)
        # A missing one may be created at any moment, and jobs wait for it.
        if found is not None:
            self._known[resource, name] = self._clock(), found
        return found
