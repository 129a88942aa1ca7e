"""The environment workers."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from kuberoll_api.model.pods import PodOptions, Resources
from kuberoll_api.model.traits import OPERATION, POD, Traits
from kuberoll_api.model.types import CONFIG_MAP_KEY_PATTERN, FILE_PATH_PATTERN, DnsName, Model


class FileItem(Model):
    """A key of a ConfigMap, and the path of its file."""

    key: Annotated[str, StringConstraints(pattern=CONFIG_MAP_KEY_PATTERN, max_length=253)] = Field(
        description="Key of the ConfigMap."
    )
    path: Annotated[str, StringConstraints(pattern=FILE_PATH_PATTERN, max_length=512)] = Field(
        description="Path of the file, relative to the manifest's directory."
    )
    mode: Annotated[int, Field(ge=0, le=0o777)] | None = Field(
        default=None,
        description="Mode of the file, as a decimal number: 493 for a program. Absent: 420, which is 0644.",
    )


class FilesConfigMap(Model):
    """A ConfigMap with files, as in a pod's volume."""

    name: DnsName = Field(description="Name of the ConfigMap, in the job's namespace.")
    items: list[FileItem] = Field(
        default_factory=list,
        max_length=256,
        description="Paths of its keys, for files in directories; none: every key is a file of that name.",
    )


class WorkerFiles(Model):
    """The files beside the manifest, for worker pods."""

    config_map: FilesConfigMap = Field(description="The ConfigMap that holds the files; `kuberoll apply` makes it.")


class Workers(PodOptions):
    """The environment workers: processes on a laptop, pods in a cluster."""

    container_name: ClassVar[str] = "worker"

    resources: Annotated[Resources, POD] = Field(
        default_factory=Resources, description="Requests and limits of the main container."
    )
    replicas: Annotated[int, OPERATION | Traits(change="AnyTime", reader="Operator")] = Field(
        default=1, ge=0, le=100_000, description="Maximum number of concurrent workers."
    )
    shards: Annotated[int | None, OPERATION | Traits(reader="Operator")] = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Number of parts of the dataset, each with its own output file; absent: replicas.",
    )
    files: Annotated[WorkerFiles | None, POD] = Field(
        default=None,
        description="Files that stand in for the manifest's directory in worker pods, where modules of entrypoints and "
        "relative paths of the dataset are searched. Cluster only: `kuberoll run` uses the directory itself.",
    )
    retries_per_shard: Annotated[int, POD] = Field(
        default=6,
        ge=0,
        le=1000,
        description="Pod restarts allowed per shard before it fails; evictions and lost nodes do not count. "
        "Cluster only.",
    )
    max_failed_shards: Annotated[int, POD] = Field(
        default=0, ge=0, le=100_000, description="Shards that may fail before the job does. Cluster only."
    )

    @property
    def shard_count(self) -> int:
        """Number of shards."""
        return self.shards or max(1, self.replicas)
