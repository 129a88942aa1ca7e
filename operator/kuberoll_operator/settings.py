"""Settings of the operator and of the broker, the same for all jobs."""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from ipaddress import ip_network
from types import NoneType
from typing import Annotated, Any, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from kuberoll_api.output_location import InvalidOutput, output_of
from kuberoll_operator.quantities import number_of

ENVIRONMENT_PREFIX = "KUBEROLL_"

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Network = Annotated[str, AfterValidator(lambda text: str(ip_network(text)))]


def _image(role: str) -> str:
    return f"kuberoll/{role}:{version('kuberoll')}"


def _output_root(uri: str) -> str:
    try:
        output_of(uri)
    except InvalidOutput as error:
        raise ValueError(str(error).removeprefix("spec.output.uri: ")) from error
    return uri


def _bytes(quantity: Any) -> int | None:
    if quantity is None:
        return None
    if (found := int(number_of(quantity))) < 1:
        raise ValueError("must be at least one byte")
    return found


class InvalidSettings(ValueError):
    """Settings are invalid; the message names each of them and its mistake."""


class MissingTokenKey(ValueError):
    """There is no key to derive the tokens of jobs from."""


class SharedSettings(BaseModel):
    """Settings of all processes of an installation; every field can be set by KUBEROLL_<FIELD>, lists with commas."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_image: str = Field(
        default_factory=lambda: _image("worker"),
        description="Image of worker and finish pods, for jobs that do not name one.",
    )
    image_pull_policy: str | None = Field(
        default=None, description="imagePullPolicy of all pods; absent: Kubernetes' default."
    )
    run_as_user: int | None = Field(
        default=65532, ge=1, description="User id of all pods; absent if the cluster chooses it (OpenShift)."
    )
    run_as_group: int | None = Field(
        default=65532, ge=1, description="Group id of all pods; absent if the cluster chooses it (OpenShift)."
    )
    token_key: SecretStr | None = Field(
        default=None,
        description="Secret key from which, with a job's uid, the bearer tokens of its policy and of its workers are "
        "derived. Required. Changing it invalidates the tokens of running jobs.",
    )
    namespaces: tuple[str, ...] = Field(default=(), description="Namespaces to watch; none: all.")
    http_host: str = Field(default="", description="Address of /healthz, /readyz and /metrics; empty: all.")
    http_port: Port = Field(default=8080, description="Port of /healthz, /readyz and /metrics.")
    log_level: str = Field(default="info", description="debug, info, warning or error.")

    def token_of(self, uid: str, scope: str) -> str:
        """The bearer token of a scope, of the job with this uid.

        Raises:
            MissingTokenKey: No key is set.
        """
        return hmac.new(self.signing_key(), f"{uid}/{scope}".encode(), "sha256").hexdigest()

    def signing_key(self) -> bytes:
        """The key that tokens are derived from.

        Raises:
            MissingTokenKey: No key is set.
        """
        key = "" if self.token_key is None else self.token_key.get_secret_value().strip()
        if not key:
            raise MissingTokenKey(
                f"{ENVIRONMENT_PREFIX}TOKEN_KEY: not set or empty, and without a key anybody who can read a RolloutJob "
                "could derive the tokens of its policy; set it to a random text (the chart does so, see jobs.tokenKey)"
            )
        return key.encode()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], **overrides: Any) -> Self:
        """Settings from environment variables; `overrides` take precedence.

        Raises:
            InvalidSettings: A value is invalid; the message names the variable or the setting.
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
            return cls.model_validate({**found, **overrides})
        except ValidationError as error:
            raise InvalidSettings("; ".join(_mistakes(error, overrides))) from error


class Settings(SharedSettings):
    """Settings of the operator."""

    generation_image: str = Field(
        default_factory=lambda: _image("generation"),
        description="Image of generation pods, for jobs that do not name one.",
    )
    fs_group: int | None = Field(
        default=65532,
        ge=1,
        description="Group id of volumes that pods write to; absent if the cluster chooses it (OpenShift).",
    )
    default_output: Annotated[str, AfterValidator(_output_root)] | None = Field(
        default=None,
        description="Root of the output of jobs that name none, which write to ROOT/NAMESPACE/NAME: s3://bucket/path "
        "or pvc://CLAIM[/path], a claim of the job's namespace; absent: such jobs are rejected.",
    )
    model_cache_host_path: Annotated[str, StringConstraints(pattern=r"^/.+[^/]$")] | None = Field(
        default=None,
        description="Directory of every node in which engines' models are kept, for the next replica and the next job; "
        "absent: no such directory.",
    )
    model_cache_claim: str | None = Field(
        default=None,
        description="ReadWriteMany claim of the job's namespace, instead of that directory; absent: none.",
    )
    model_cache_size: Annotated[int, BeforeValidator(_bytes)] | None = Field(
        default=None,
        description="Size of all models in it, a Kubernetes quantity; absent: as much as there is room for.",
    )
    model_cache_across_namespaces: bool = Field(
        default=False, description="Whether jobs of all namespaces share the models of a node."
    )
    model_cache_digests: bool = Field(
        default=False, description="Whether models are read for their digests before each start of an engine."
    )
    egress_ports: tuple[Port, ...] = Field(
        default=(443,),
        description="TCP ports that worker pods may reach at any address: object stores, hubs, trackers.",
    )
    egress_except: tuple[Network, ...] = Field(
        default=(),
        description="Networks (CIDR) excluded from that: the cluster's own, of pods, services and nodes.",
    )
    workload_identity: bool = Field(
        default=True,
        description="Whether workers of jobs with object stores (s3, gs) may reach the agents that give pods a cloud's "
        "identity, of EKS and GKE.",
    )
    kuberay: bool | None = Field(
        default=None, description="Whether the cluster serves ray.io/v1 RayServices; absent: detect it, repeatedly."
    )
    queues: bool = Field(
        default=True, description="Whether jobs wait for quota in the Kueue queue that they are labelled with."
    )
    kueue: bool | None = Field(
        default=None,
        description="Whether the cluster serves kueue.x-k8s.io/v1beta2 Workloads; absent: detect it, repeatedly.",
    )
    leader_worker_set: bool | None = Field(
        default=None,
        description="Whether the cluster serves leaderworkerset.x-k8s.io/v1 LeaderWorkerSets; absent: detect it, "
        "repeatedly.",
    )
    agent_sandbox: bool | None = Field(
        default=None,
        description="Whether the cluster serves extensions.agents.x-k8s.io/v1beta1 SandboxClaims; absent: detect it, "
        "repeatedly.",
    )
    sandbox_broker: Annotated[str, StringConstraints(pattern=r"^http://[^/:\s]+:[0-9]+$")] | None = Field(
        default=None,
        description="Broker, which makes the pods of trajectories' sandboxes: http://HOST:PORT; absent: jobs with "
        "sandboxes are rejected.",
    )
    kuberay_namespace: str | None = Field(
        default=None, description="Namespace of KubeRay's operator, which may connect to Ray; absent: any namespace."
    )
    ray_version: Annotated[str, StringConstraints(pattern=r"^[0-9]+[.][0-9]+[.][0-9]+")] = Field(
        default="2.60.0", description="Version of Ray in generation images, for KubeRay."
    )
    progress_seconds: Seconds = Field(
        default=15.0, description="Minimum seconds between two updates of a job's progress in its status."
    )
    idle_engines_seconds: Seconds = Field(
        default=600.0,
        description="Seconds without a running worker after which the engines of a job under way are given back, until "
        "one runs.",
    )
    turn_seconds: Seconds = Field(
        default=300.0,
        description="Seconds without room in the cluster after which younger jobs without room give their engines "
        "back, so that an older one has room for its workers.",
    )
    replace_lost_workers: bool = Field(
        default=True,
        description="Whether pods of workers that were deleted, and whose node does not answer, are marked as ended, "
        "so that others take their place.",
    )
    leader_election: bool = Field(default=True, description="Reconcile only while holding the lease.")
    lease_name: str = Field(default="kuberoll-operator", description="Name of the lease.")
    lease_namespace: str = Field(default="kuberoll-system", description="Namespace of the lease: the operator's own.")
    lease_seconds: Seconds = Field(
        default=30.0, description="Seconds after which a lease that was not renewed is free."
    )
    identity: str | None = Field(
        default=None, description="Holder's identity in the lease; absent: host name and a random part."
    )
    pod_name: str | None = Field(
        default=None, description="Pod that the operator runs in; the lease is owned by its controller."
    )
    concurrency: int = Field(default=8, ge=1, le=256, description="Jobs that are reconciled concurrently.")
    reconcile_seconds: Seconds = Field(default=60.0, description="Time limit of one reconcile, in seconds.")
    resync_seconds: Seconds = Field(
        default=1800.0, description="Seconds after which every job is reconciled again, even without a change."
    )

    @model_validator(mode="after")
    def _one_model_cache(self) -> Self:
        if self.model_cache_host_path is not None and self.model_cache_claim is not None:
            raise ValueError("model_cache_host_path and model_cache_claim: set one of them")
        return self


def _mistakes(error: ValidationError, overrides: Mapping[str, Any]) -> Iterator[str]:
    for item in error.errors(include_url=False):
        if not item["loc"]:
            yield str(item["msg"]).removeprefix("Value error, ")
            continue
        name, *path = map(str, item["loc"])
        shown = name if name in overrides else f"environment variable {ENVIRONMENT_PREFIX}{name.upper()}"
        found = "" if name == "token_key" else f", found {item['input']!r}"
        yield f"{'.'.join([shown, *path])}: {item['msg']}{found}"
