"""Cluster-wide objects that Workloads refer to, read when needed and cached for a minute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.remembered import RememberingReader
from kuberoll_operator.kube.resources import RESOURCE_FLAVORS, WORKLOAD_PRIORITY_CLASSES
from kuberoll_operator.model import ClusterQuota

REMEMBER_SECONDS: Final = 60.0


class QuotaReader:
    """Reads ResourceFlavors and WorkloadPriorityClasses, which hardly ever change."""

    def __init__(self, client: Client) -> None:
        self._reader = RememberingReader(client, seconds=REMEMBER_SECONDS)

    async def read(self, flavors: Iterable[str], priority_class: str | None) -> ClusterQuota:
        """These flavors, and the value of this priority class.

        Raises:
            ApiError: They could not be read.
        """
        found = {name: await self._reader.get(RESOURCE_FLAVORS, None, name) for name in sorted(flavors)}
        priority = (
            None if priority_class is None else await self._reader.get(WORKLOAD_PRIORITY_CLASSES, None, priority_class)
        )
        return ClusterQuota(
            flavors={name: item.get("spec") or {} for name, item in found.items() if item is not None},
            priority=None if priority is None else int(priority.get("value", 0)),
        )
