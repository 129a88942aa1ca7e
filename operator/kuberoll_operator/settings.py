"""What the operator is told when it starts, the same for all jobs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

ENVIRONMENT_PREFIX = "KUBEROLL_"

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


def _image(role: str) -> str:
    return f"kuberoll/{role}:{version('kuberoll')}"


class Settings(BaseModel):
    """Settings of the operator; every field can be given as KUBEROLL_<FIELD>, lists with commas."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation_image: str = Field(
        default_factory=lambda: _image("generation"), description="Image of generation pods of jobs that name none."
    )
    worker_image: str = Field(
        default_factory=lambda: _image("worker"), description="Image of worker and finish pods of jobs that name none."
    )
    image_pull_policy: str | None = Field(default=None, description="Of all pods; absent: Kubernetes' default.")
    fs_group: int | None = Field(
        default=65532,
        ge=1,
        description="Group of volumes that pods write to; absent where the cluster chooses it (OpenShift).",
    )
    egress_ports: tuple[Port, ...] = Field(
        default=(443,), description="TCP ports that worker pods may reach everywhere: object stores, hubs, trackers."
    )
    kuberay: bool = Field(
        default=False,
        description="Whether the cluster serves ray.io/v1 RayServices; found out when the operator starts.",
    )
    progress_seconds: Seconds = Field(
        default=15.0, description="Progress is written to a job's status at most this often."
    )
    namespaces: tuple[str, ...] = Field(default=(), description="Namespaces to watch; none: all.")
    leader_election: bool = Field(default=True, description="Work only while holding the lease.")
    lease_name: str = Field(default="kuberoll-operator", description="Name of the lease.")
    lease_namespace: str = Field(default="kuberoll-system", description="Namespace of the lease: the operator's own.")
    lease_seconds: Seconds = Field(default=15.0, description="A lease that was not renewed for so long is free.")
    identity: str | None = Field(default=None, description="Holder of the lease; absent: host name and a random part.")
    concurrency: int = Field(default=8, ge=1, le=256, description="Jobs that are reconciled at once.")
    reconcile_seconds: Seconds = Field(default=60.0, description="Longest that one reconcile may take.")
    resync_seconds: Seconds = Field(default=600.0, description="Every job is looked at at least this often.")
    http_host: str = Field(default="", description="Address of /healthz, /readyz and /metrics; empty: all.")
    http_port: Port = Field(default=8080, description="Port of /healthz, /readyz and /metrics.")
    log_level: str = Field(default="info", description="debug, info, warning or error.")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], **given: Any) -> Self:
        """Settings of environment variables, under those that are given here.

        Raises:
            pydantic.ValidationError: A variable's value cannot be used.
        """
        found: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            text = environment.get(ENVIRONMENT_PREFIX + name.upper())
            if text is None or (not text and field.default is None):
                continue
            listed = isinstance(field.default, tuple)
            found[name] = [item for item in map(str.strip, text.split(",")) if item] if listed else text
        return cls.model_validate({**found, **given})
