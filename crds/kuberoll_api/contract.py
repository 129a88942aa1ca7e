"""The contract between the operator and the pods of a job: what pods are given, what they answer, how they end.

Both sides import these types. The images of a job may be of another release than the operator, so fields are added and
never change their meaning, and a reader passes over what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field, StringConstraints

from kuberoll_api.model.generation import Autoscaling, Generation, SimulatedEngine, Weights
from kuberoll_api.model.types import MAX_COUNT

EXIT_FAILED: Final = 1
"""Exit code: anything that has no code of its own; another try may succeed."""

EXIT_DRAINED: Final = 75
"""Exit code: told to stop before the work was done; the next pod resumes from there (EX_TEMPFAIL)."""

EXIT_REFUSED: Final = 78
"""Exit code: the job, its dataset or its output cannot be used, and trying again will not help (EX_CONFIG)."""

GENERATION_PORT: Final = 8000
"""Port of a generation pod: the policy."""

STATUS_PORT: Final = 8080
"""Port of a generation pod: its health, its weights and its metrics."""

PROGRESS_PORT: Final = 9464
"""Port of a worker pod: its progress, its health and its metrics."""

APPLICATION: Final = "kuberoll"
"""Name of the Serve application."""

DEPLOYMENT: Final = "Generation"
"""Name of its one deployment."""

IMPORT_PATH: Final = "kuberoll_workers.serving.app:build"
"""Import path of the application's builder."""

MESSAGE_BYTES: Final = 4096
"""Longest termination message that Kubernetes keeps, bytes."""

Scope = Literal["generate", "weights", "read"]
"""Permission of a token: `generate` samples, `weights` publishes weights, `read` reads the policy's state."""

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)

# Bounds of what a pod may answer: environments run there, so the answer is not to be trusted.
_Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Sum = Annotated[float, Field(allow_inf_nan=False)]
_Version = Annotated[str, StringConstraints(max_length=63)]


def token_variable(scope: Scope) -> str:
    """Name of the environment variable that holds the token of a scope."""
    return f"KUBEROLL_TOKEN_{scope.upper()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodConfig:
    """The file that all pods of a job read.

    Attributes:
        job: The RolloutJob, without what only the operator needs.
        base: Directory of the mounted dataset.
        endpoint: Base URL of the policy.
        port: Port that a generation pod listens at.
        output: The run's directory or URI.
        turns: Directory of the turn log; None: turns are not journaled.
        discovery: How the policy's replicas are found: asked for at the endpoint, by DNS, or listed here.
        replicas: Their base URLs, with discovery `Static`.
        replicas_host: `host:port` whose addresses are the replicas, with discovery `DNS`.
    """

    job: dict[str, Any]
    base: str
    endpoint: str
    port: int = GENERATION_PORT
    shard_count: int
    output: str
    turns: str | None = None
    discovery: Literal["Endpoint", "DNS", "Static"] = "Endpoint"
    replicas: list[str] = field(default_factory=list)
    replicas_host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSource:
    """Weights in place of the model's own.

    Attributes:
        uri: A directory that the replicas have mounted, or an s3:// or gs:// URI.
        version: The name that trajectories give them.
    """

    uri: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArgs:
    """Arguments of the Serve application: all that a replica needs, as plain JSON.

    A change is new code to Serve, which starts all replicas anew; `weights` alone is overridden by the deployment's
    `user_config`, which may change in place.

    Attributes:
        model, tokenizer: Directory or hub id.
        model_name: The model's name for callers of the OpenAI-compatible routes; None: `model`.
        gpus: GPUs of one replica, or a part of one; None: as many as `engine_args` spread the model over.
        bundles: Resources of each part of a replica that spans pods, the first being the replica's own; None: it is
            within one pod.
        autoscaling: Serve's `autoscaling_config` in place of a fixed number of `replicas`.
        tokens_required: Refuse to start without tokens. They are no arguments, because many may read Serve's
            configuration: a replica takes them out of its environment variables.
        weights: Weights to start with in place of the model's own.
        application: Name of the application in Serve.
        drain_seconds: Longest time that a replica may take to answer the requests it has when it is stopped.
    """

    model: str
    tokenizer: str
    engine: str
    model_name: str | None = None
    revision: str | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, Any] | None = None
    replicas: int = 1
    max_ongoing_requests: int = 512
    gpus: float | None = None
    bundles: list[dict[str, float]] | None = None
    autoscaling: dict[str, Any] | None = None
    tokens_required: bool = False
    weights: WeightsSource | None = None
    application: str = APPLICATION
    drain_seconds: float = 600.0

    @classmethod
    def of(
        cls, generation: Generation, *, model: str | None = None, tokenizer: str | None = None, **more: Any
    ) -> ServeArgs:
        """The arguments for a job's generation.

        Args:
            model, tokenizer: Their places on the machine that serves; None: as the job has them.
            more: Fields that follow from where the replicas are placed.
        """
        source = generation.model.source
        settings = generation.simulated if generation.simulated is not None else SimulatedEngine()
        simulated = settings.model_dump(mode="json", by_alias=True) if generation.engine == "Simulated" else None
        fields: dict[str, Any] = {
            "model": model or source,
            "tokenizer": tokenizer or generation.model.tokenizer or source,
            "engine": generation.engine,
            "model_name": None if model in (None, source) else source,
            "revision": generation.model.revision,
            "engine_args": generation.engine_args,
            "simulated": simulated,
            "replicas": generation.replicas or 1,
            "max_ongoing_requests": generation.max_ongoing_requests,
            "autoscaling": autoscaling_config(generation.autoscaling),
        }
        return cls(**{**fields, **more})


def fewest_replicas(autoscaling: Autoscaling) -> int:
    """Fewest replicas while a shard is not done.

    Never none: a turn would wait minutes for the first one. When the last shard is done all of them are stopped.
    """
    return max(1, autoscaling.min_replicas)


def autoscaling_config(autoscaling: Autoscaling | None) -> dict[str, Any] | None:
    """Serve's `autoscaling_config`; None: a fixed number of replicas."""
    if autoscaling is None:
        return None
    return {
        "min_replicas": fewest_replicas(autoscaling),
        "max_replicas": autoscaling.max_replicas,
        "target_ongoing_requests": autoscaling.target_ongoing_requests,
        "upscale_delay_s": autoscaling.upscale_delay_seconds,
        "downscale_delay_s": autoscaling.downscale_delay_seconds,
    }


def weights_source(weights: Weights | None) -> WeightsSource | None:
    """The weights of a job's `spec.weights`."""
    return None if weights is None else WeightsSource(uri=weights.uri, version=weights.version)


def user_config(weights: WeightsSource | None) -> dict[str, Any]:
    """Serve's `user_config` of the deployment: what may change while it runs."""
    return {"weights": None if weights is None else {"uri": weights.uri, "version": weights.version}}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodProgress:
    """Answer of a worker pod at `/progress`: counts since its shard began, whichever pod did the work.

    Attributes:
        failed: Trajectories that this pod gave up; those of earlier pods are tried again.
        planned: Trajectories that the shard will come to; 0 while the dataset is being read.
        generating: Turns that wait for a response now.
        policy_version: Version of the newest response; None: there was none.
    """

    shard: _Count
    planned: _Count = 0
    trajectories: _Count = 0
    failed: _Count = 0
    turns: _Count = 0
    generated_tokens: _Count = 0
    reward_sum: _Sum = 0.0
    generating: _Count = 0
    policy_version: _Version | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodWeights:
    """Answer of a generation pod at `/weights`.

    Attributes:
        wanted: Version that the job asks for.
        served: Version that it generates with; None: none, or unknown.
        problem: Why the wanted version is not served; None: it is, or is being loaded.
    """

    wanted: _Version | None = None
    served: _Version | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWeights:
    """Answer of the Serve application at `/v1/weights`.

    Attributes:
        wanted: Version that replicas are to serve.
        replicas: Version that each replica serves; None: unknown.
        problems: Why a replica does not serve the wanted version.
    """

    wanted: _Version | None = None
    replicas: Annotated[Mapping[str, _Version | None], Field(max_length=4096)]
    problems: Annotated[Mapping[str, str], Field(max_length=4096)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessage:
    """Termination message of a worker pod, and of the pod that checks what workers need.

    Attributes:
        shard: Its shard, 0 for the check of all shards; None: it ended before it knew.
        planned, trajectories, failed, turns, generated_tokens, reward_sum: As in `PodProgress`, at the end.
        dropped: Trajectories that were not wanted.
        done: Whether the work was done.
        cause: Why it was not, for the user; empty: it was.
    """

    shard: _Count | None = None
    planned: _Count = 0
    trajectories: _Count = 0
    failed: _Count = 0
    dropped: _Count = 0
    turns: _Count = 0
    generated_tokens: _Count = 0
    reward_sum: _Sum = 0.0
    done: bool = False
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentResult:
    """Result of one environment in a `FinishMessage`.

    Attributes:
        mean_reward: None: it has no trajectory.
        pass_at_1: None: its rewards have no threshold of success.
    """

    trajectories: _Count = 0
    failed: _Count = 0
    mean_reward: _Sum | None = None
    pass_at_1: _Sum | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishMessage:
    """Termination message of the pod that ends a run.

    Attributes:
        trajectories, failed, dropped: Of the whole run.
        planned: Trajectories that the run was to come to.
        missing: Planned trajectories of which nothing is known.
        mean_reward: None: there is no trajectory.
        environments: By name, as many as the message has room for.
        environments_left_out: Number of those that it has no room for.
        cause: Why the run is not complete, for the user; empty: it is.
    """

    trajectories: _Count = 0
    failed: _Count = 0
    dropped: _Count = 0
    planned: _Count = 0
    missing: _Count = 0
    mean_reward: _Sum | None = None
    environments: Mapping[str, EnvironmentResult] = field(default_factory=dict)
    environments_left_out: _Count = 0
    cause: str = ""
