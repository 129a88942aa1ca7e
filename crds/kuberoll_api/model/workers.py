"""The environment workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kuberoll_api.model.pods import PodOptions, Resources
from kuberoll_api.model.traits import OPERATION, POD, Traits


class Workers(PodOptions):
    """The environment workers: processes on a laptop, pods in a cluster."""

    resources: Annotated[Resources, POD] = Field(
        default_factory=Resources, description="Requests and limits of the main container."
    )
    replicas: Annotated[int, OPERATION | Traits(change="AnyTime", reader="Operator")] = Field(
        default=1, ge=0, le=100_000, description="Maximum number of concurrent workers."
    )
    shards: Annotated[int | None, OPERATION] = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Number of parts of the dataset, each with its own output file; absent: replicas.",
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
