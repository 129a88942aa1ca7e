"""The destination of the trajectories, and experiment trackers."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from kuberoll_api.model.contradictions import contradiction
from kuberoll_api.model.types import (
    PVC_PATTERN,
    Model,
    TrackingName,
)


class OutputParts(Model):
    """Objects in an object store, which cannot be appended to; not used for a directory."""

    max_seconds: float = Field(
        default=15.0,
        gt=0,
        le=3600,
        description="Maximum seconds that a trajectory waits for its part to be written; until then a crash loses it. "
        "A part of 32 MiB is written at once.",
    )


class WandbTracking(Model):
    """A run at Weights & Biases, with the usual login, WANDB_API_KEY and WANDB_MODE."""

    project: TrackingName = Field(description="The project.")
    entity: TrackingName | None = Field(default=None, description="User or team; absent: the default one.")
    group: TrackingName | None = Field(default=None, description="Group of runs.")
    name: TrackingName | None = Field(default=None, description="Name of the run; absent: the job's.")
    tags: list[Annotated[str, StringConstraints(min_length=1, max_length=64)]] = Field(
        default_factory=list, max_length=64, description="Tags of the run."
    )
    nemo_gym_rollouts: bool = Field(
        default=False,
        description="Log the finished trajectories as NeMo Gym does, too: the table Rollouts, with the JSON of one "
        "rollout in each row of its column Rollout, and Gym's statistics of each agent.",
    )


class MlflowTracking(Model):
    """A run in an MLflow store, with the job's name; credentials come from MLflow's environment variables."""

    tracking_uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)] = Field(
        description="Tracking URI of the store: http://..., sqlite:///..., databricks."
    )
    experiment: TrackingName = Field(description="Name of the experiment; created if it does not exist.")


class Tracking(Model):
    """Experiment trackers to which the run is logged at its end; a tracker that fails never fails the run."""

    wandb: WandbTracking | None = Field(default=None, description="Weights & Biases.")
    mlflow: MlflowTracking | None = Field(default=None, description="MLflow.")
    trajectories: bool = Field(default=False, description="Upload the shards as well.")

    @model_validator(mode="after")
    def _some_tracker(self) -> Self:
        if self.wandb is None and self.mlflow is None:
            raise contradiction("set wandb or mlflow, or both; found neither")
        return self


class Output(Model):
    """Destination of the trajectories."""

    uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)] | None = Field(
        default=None,
        description="URI of an object store (s3://, gs://, abfs:// or any other of fsspec); in a cluster also "
        "pvc://CLAIM[/path], a directory of a PersistentVolumeClaim; with `kuberoll run` also a directory "
        "(relative to the working directory). Absent: in a cluster the operator's default, "
        "<root>/<namespace>/<job's name>; with `kuberoll run` runs/<job's name>, also in place of pvc://.",
    )
    format: Literal["JSONL", "Parquet"] = Field(
        default="JSONL",
        description="Final format of the shards; a shard in progress is always JSON lines.",
    )
    parts: OutputParts = Field(default_factory=OutputParts, description="Sizes of the parts of a shard in progress.")
    tracking: Tracking | None = Field(default=None, description="Experiment trackers to which the run is logged.")

    @model_validator(mode="after")
    def _claim(self) -> Self:
        if (self.uri or "").startswith("pvc:") and not re.fullmatch(PVC_PATTERN, str(self.uri)):
            raise contradiction(
                f'found "{self.uri}"; write pvc://CLAIM or pvc://CLAIM/path, with the name of a PersistentVolumeClaim '
                "and a path without . and ..",
                "uri",
            )
        return self
