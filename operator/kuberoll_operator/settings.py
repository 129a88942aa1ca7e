"""What the operator is told when it starts, the same for all jobs."""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from ipaddress import ip_network
from types import NoneType
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, StringConstraints, ValidationError

ENVIRONMENT_PREFIX = "KUBEROLL_"

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Network = Annotated[str, AfterValidator(lambda text: str(ip_network(text)))]


def _image(role: str) -> str:
    return f"kuberoll/{role}:{version('kuberoll')}"


class SettingsRefused(ValueError):
    """Settings cannot be used; the message names each and what is wrong with it."""


class NoTokenKey(ValueError):
    """The operator has no key to make the policies' tokens with."""


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
    run_as_user: int | None = Field(
        default=65532, ge=1, description="User of all pods; absent where the cluster chooses it (OpenShift)."
    )
    run_as_group: int | None = Field(
        default=65532, ge=1, description="Group of all pods; absent where the cluster chooses it (OpenShift)."
    )
    fs_group: int | None = Field(
        default=65532,
        ge=1,
        description="Group of volumes that pods write to; absent where the cluster chooses it (OpenShift).",
    )
    egress_ports: tuple[Port, ...] = Field(
        default=(443,), description="TCP ports that worker pods may reach everywhere: object stores, hubs, trackers."
    )
    egress_except: tuple[Network, ...] = Field(
        default=(),
        description="Networks (CIDR) that those ports do not lead to: the cluster's own, of pods, services and nodes.",
    )
    kuberay: bool | None = Field(
        default=None, description="Whether the cluster serves ray.io/v1 RayServices; absent: ask it, now and again."
    )
    queues: bool = Field(
        default=True, description="Whether jobs wait for quota in the queue of Kueue's that they are labelled with."
    )
    kueue: bool | None = Field(
        default=None,
        description="Whether the cluster serves kueue.x-k8s.io/v1beta2 Workloads; absent: ask it, now and again.",
    )
    leader_worker_set: bool | None = Field(
        default=None,
        description="Whether the cluster serves leaderworkerset.x-k8s.io/v1 LeaderWorkerSets; absent: ask it, now and "
        "again.",
    )
    kuberay_namespace: str | None = Field(
        default=None, description="Namespace of KubeRay's operator, which is let through to Ray; absent: any."
    )
    ray_version: Annotated[str, StringConstraints(pattern=r"^[0-9]+[.][0-9]+[.][0-9]+")] = Field(
        default="2.60.0", description="Version of Ray in generation images, for KubeRay."
    )
    token_key: SecretStr | None = Field(
        default=None,
        description="Secret key from which, with the job's uid, the bearer tokens of its policy are derived; "
        "there is no operator without one. Another key makes other tokens: jobs that run then lose their policy.",
    )
    progress_seconds: Seconds = Field(
        default=15.0, description="Progress is written to a job's status at most this often."
    )
    namespaces: tuple[str, ...] = Field(default=(), description="Namespaces to watch; none: all.")
    leader_election: bool = Field(default=True, description="Work only while holding the lease.")
    lease_name: str = Field(default="kuberoll-operator", description="Name of the lease.")
    lease_namespace: str = Field(default="kuberoll-system", description="Namespace of the lease: the operator's own.")
    lease_seconds: Seconds = Field(default=30.0, description="A lease that was not renewed for so long is free.")
    identity: str | None = Field(default=None, description="Holder of the lease; absent: host name and a random part.")
    pod_name: str | None = Field(
        default=None, description="Pod that the operator runs in; the lease is owned by its controller."
    )
    concurrency: int = Field(default=8, ge=1, le=256, description="Jobs that are reconciled at once.")
    reconcile_seconds: Seconds = Field(default=60.0, description="Longest that one reconcile may take.")
    resync_seconds: Seconds = Field(default=1800.0, description="Every job is looked at at least this often.")
    http_host: str = Field(default="", description="Address of /healthz, /readyz and /metrics; empty: all.")
    http_port: Port = Field(default=8080, description="Port of /healthz, /readyz and /metrics.")
    log_level: str = Field(default="info", description="debug, info, warning or error.")

    def token_of(self, uid: str, scope: str) -> str:
        """The token of a scope for the policy of the job with this uid.

        Raises:
            NoTokenKey: There is no key to make it with.
        """
        return hmac.new(self.signing_key(), f"{uid}/{scope}".encode(), "sha256").hexdigest()

    def signing_key(self) -> bytes:
        """The key that tokens are made with.

        Raises:
            NoTokenKey: There is none.
        """
        key = "" if self.token_key is None else self.token_key.get_secret_value().strip()
        if not key:
            raise NoTokenKey(
                f"{ENVIRONMENT_PREFIX}TOKEN_KEY: not set or empty, and without a key anybody who can read a RolloutJob "
                "could make the tokens of its policy; set it to a random text (the chart does so, see jobs.tokenKey)"
            )
        return key.encode()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], **given: Any) -> Self:
        """Settings of environment variables, under those that are given here.

        Raises:
            SettingsRefused: A variable's value, or one that is given, cannot be used; with its name.
        """
        found: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            text = environment.get(ENVIRONMENT_PREFIX + name.upper())
            if text is None:
                continue
            if not text and NoneType in get_args(field.annotation):
                found[name] = None
                continue
            listed = isinstance(field.default, tuple)
            found[name] = [item for item in map(str.strip, text.split(",")) if item] if listed else text
        try:
            return cls.model_validate({**found, **given})
        except ValidationError as error:
            raise SettingsRefused("; ".join(_mistakes(error, given))) from error


def _mistakes(error: ValidationError, given: Mapping[str, Any]) -> Iterator[str]:
    for item in error.errors(include_url=False):
        name, *path = map(str, item["loc"])
        shown = name if name in given else f"environment variable {ENVIRONMENT_PREFIX}{name.upper()}"
        found = "" if name == "token_key" else f", found {item['input']!r}"
        yield f"{'.'.join([shown, *path])}: {item['msg']}{found}"
