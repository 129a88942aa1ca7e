"""ConfigMaps that a job names and its pods mount: what is missing of them, which no pod's status says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.paths import format_path
from kuberoll_operator.model import Object


class ConfigMapUse(NamedTuple):
    """A field of a job that names a ConfigMap.

    Attributes:
        keys: Keys that the ConfigMap must have.
        remedy: Way to create it.
    """

    field: str
    name: str
    keys: Sequence[str]
    remedy: str

    def problem(self, live: Object | None) -> str | None:
        """Why a pod that mounts the ConfigMap cannot start; None if it can.

        Args:
            live: The ConfigMap; None if it does not exist.
        """
        if live is None:
            return f"ConfigMap {self.name} does not exist ({self.field}); {self.remedy}"
        present = {**(live.get("data") or {}), **(live.get("binaryData") or {})}
        missing = [key for key in self.keys if key not in present]
        if not missing:
            return None
        return f"ConfigMap {self.name} has no key {', '.join(missing)} ({self.field}); {self.remedy}"


def config_map_uses(job: RolloutJob) -> list[ConfigMapUse]:
    """The ConfigMaps that a job names itself; not those of pod templates."""
    found = []
    if (files := job.spec.workers.files) is not None:
        found.append(
            ConfigMapUse(
                "spec.workers.files",
                files.config_map.name,
                [item.key for item in files.config_map.items],
                "`kuberoll apply` makes it from the files beside the manifest",
            )
        )
    for path, source in job.spec.dataset.located_sources():
        if (rows := source.config_map) is not None:
            field = f"{format_path(path)}.configMap"
            found.append(ConfigMapUse(field, rows.name, [rows.key], "create it, or correct the name"))
    return found
