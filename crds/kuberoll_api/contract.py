"""Contract between the operator and the pods of a job: configuration, HTTP answers, exit codes, termination messages.

Both sides import these types. The images of a job may be of another release than the operator, so fields may be added
but never change their meaning, and readers ignore unknown fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field, StringConstraints

from kuberoll_api.model.access import Scope as Scope
from kuberoll_api.model.generation import Autoscaling, Generation, SelfCheck, SimulatedEngine, Weights
from kuberoll_api.model.types import MAX_COUNT, Commit
from kuberoll_api.status import Timestamp

EXIT_FAILED: Final = 1
"""Exit code: any failure without a code of its own; another attempt may succeed."""

EXIT_DRAINED: Final = 75
"""Exit code: stopped by a signal before the work was done; the next pod resumes from there (EX_TEMPFAIL)."""

EXIT_REFUSED: Final = 78
"""Exit code: the job, its dataset or its output cannot be used, and a retry would not help (EX_CONFIG)."""

DATASET_DIRECTORY: Final = "/etc/kuberoll-dataset"
"""Where workers mount a dataset in a ConfigMap or on a volume; of several, each in a directory with its number."""

GENERATION_PORT: Final = 8000
"""Port of a generation pod: the policy."""

STATUS_PORT: Final = 8080
"""Port of a generation pod: its health, its weights and its metrics."""

PROGRESS_PORT: Final = 9464
"""Port of a worker pod: its progress, its health and its metrics."""

ENVIRONMENT_PORT: Final = 8700
"""Port of a server pod of an environment with isolation Remote."""

SERVICE_PORT: Final = 8000
"""Port of a pod of a service: vLLM's OpenAI-compatible server."""

MODEL_CACHE_CONTAINER: Final = "model-cache"
"""Name of the init container that fetches an engine's model into the cache."""

MODEL_CACHE_DIRECTORY: Final = "/var/lib/kuberoll-models"
"""Where pods of engines mount the cache of models: engines read-only."""

CACHED_MODELS_VARIABLE: Final = "KUBEROLL_CACHED_MODELS"
"""Variable of engines with the path of a `CachedModels`."""

GIVEN_PREFIX: Final = "KUBEROLL_GIVEN_"
"""Prefix of variables from a container's `envFrom` in that container, of which it takes `MODEL_VARIABLES` alone."""

MODEL_VARIABLES: Final = frozenset(
    {
        "AWS_ACCESS_KEY_ID", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION",
        "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_ENDPOINT", "HF_HUB_DISABLE_XET", "HF_HUB_DOWNLOAD_TIMEOUT",
        "HF_HUB_OFFLINE", "HF_TOKEN", "HTTPS_PROXY", "HUGGING_FACE_HUB_TOKEN", "NO_PROXY", "STORAGE_EMULATOR_HOST",
        "https_proxy", "no_proxy",
    }
)  # fmt: skip
"""Variables of a job that reach the container which writes to the cache.

No others do: it may be shared with jobs of other people, and some would have Python run a job's code, or have it trust
another server than the one that it asks.
"""

ENVIRONMENT_TOKEN: Final = "KUBEROLL_ENVIRONMENT_TOKEN"
"""Variable of such a pod, with the bearer token that its requests need."""

SERVERS_TOKEN_VARIABLE: Final = "KUBEROLL_TOKEN_GENERATE_SERVERS"
"""Variable of generation pods, with a second token of scope `generate`: that of environments' server pods, if any."""

ENVIRONMENT_ANNOTATION: Final = "kuberoll.io/environment"
"""Annotation of a claimed sandbox's pod: its EnvironmentPodConfig, which a volume of the template shows as a file."""

APPLICATION: Final = "kuberoll"
"""Name of the Serve application."""

DEPLOYMENT: Final = "Generation"
"""Name of its one deployment."""

IMPORT_PATH: Final = "kuberoll_workers.serving.app:build"
"""Import path of the application's builder."""

MESSAGE_BYTES: Final = 4096
"""Maximum size of a termination message, in bytes; Kubernetes cuts the rest."""

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)

# Bounds of a pod's answer, which is not trusted because environments run there.
_Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Sum = Annotated[float, Field(allow_inf_nan=False)]
_Version = Annotated[str, StringConstraints(max_length=63)]
FAILURE_CHARACTERS: Final = 500
"""Maximum length of the description of a failure, in characters."""

_Failure = Annotated[str, StringConstraints(max_length=FAILURE_CHARACTERS)]


def token_digest(token: str) -> str:
    """SHA-256 of a bearer token, in hexadecimal. Tokens are random, so it does not help to guess them."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def token_variable(scope: Scope) -> str:
    """Name of the environment variable that holds the token of a scope."""
    return f"KUBEROLL_TOKEN_{scope.upper()}"


def access_token_variable(scope: Scope, name: str) -> str:
    """Name of the variable of generation pods with a further token of a scope: that of an entry of `access`."""
    # Names are DNS labels and have no underscores, so that no two entries have the same variable.
    return f"{token_variable(scope)}_ACCESS_{name.upper().replace('-', '_')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodConfig:
    """Content of the configuration file that all pods of a job read.

    Attributes:
        job: The RolloutJob, without the fields that only the operator needs.
        base: Directory of the dataset, where its relative paths start.
        modules: Directory of modules of the job's own, searched first; None if it brings none.
        endpoint: Base URL of the policy.
        port: Port that a generation pod listens at.
        output: The run's directory or URI.
        turns: Directory of the turn log; None if turns are not journaled.
        discovery: How workers find the policy's replicas: from the endpoint, by DNS, or listed here.
        replicas: Their base URLs, with discovery `Static`.
        replicas_host: `host:port` whose addresses are the replicas, with discovery `DNS`.
    """

    job: dict[str, Any]
    base: str
    modules: str | None = None
    endpoint: str
    port: int = GENERATION_PORT
    shard_count: int
    output: str
    turns: str | None = None
    discovery: Literal["Endpoint", "DNS", "Static"] = "Endpoint"
    replicas: list[str] = field(default_factory=list)
    replicas_host: str | None = None


def environment_token_variable(number: int) -> str:
    """Name of the variable of worker pods with the token of the environment of this number."""
    return f"KUBEROLL_TOKEN_ENVIRONMENT_{number}"


def service_url_variable(name: str) -> str:
    """Name of the variable with the base URL of a service's OpenAI-compatible API, for environments that use it."""
    return f"{_service_variable(name)}_URL"


def service_token_variable(name: str) -> str:
    """Name of the variable with the API key of a service, for environments that use it."""
    return f"{_service_variable(name)}_TOKEN"


def _service_variable(name: str) -> str:
    # DNS labels have no underscores, so that no two services have the same variables.
    return f"KUBEROLL_SERVICE_{name.upper().replace('-', '_')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPodConfig:
    """Content of the configuration file of a server pod of an environment.

    Attributes:
        job: Name of the RolloutJob, for logs.
        name, type, entrypoint, config, processes, spare_processes, step_timeout_seconds: As in the environment.
        modules: Directory of modules of the job's own, searched first; None if it brings none.
        variables, readable_paths, writable_paths: As in the environment's `access`; `variables` also has those of the
            policy, if the environment uses it.
        token_digest: Digest of the bearer token that requests need, for a pod that cannot get the token itself.
    """

    job: str
    name: str
    type: str | None = None
    entrypoint: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    spare_processes: int = 0
    step_timeout_seconds: float = 30.0
    modules: str | None = None
    variables: list[str] = field(default_factory=list)
    readable_paths: list[str] = field(default_factory=list)
    writable_paths: list[str] = field(default_factory=list)
    token_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model that the cache has.

    Attributes:
        source: As the job names it.
        path: Directory of its files, where engines see it.
        held: File that a process keeps locked, for reading, as long as it may read the model again.
        tokenizer: True if only the tokenizer's files are there.
    """

    source: str
    path: str
    held: str
    tokenizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModels:
    """Content of the file that tells an engine where the cache has its models."""

    models: list[CachedModel] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSource:
    """Weights that replace the model's own.

    Attributes:
        uri: Directory that is mounted in the replicas, or an s3:// or gs:// URI.
        version: Name of these weights in trajectories.
    """

    uri: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArgs:
    """Arguments of the Serve application: everything that a replica needs, as plain JSON.

    Serve restarts all replicas when an argument changes. `weights` is overridden by the deployment's `user_config`, and
    both by weights that are posted to `/v1/weights`, which can change in place.

    Attributes:
        model, tokenizer: Directory or hub id of each.
        model_name: The model's name in the OpenAI-compatible routes; None for `model`.
        revision: Branch, tag or commit of the model at the hub; None: its default branch.
        tokenizer_revision: The same of the tokenizer; None: the model's.
        chat_template: Jinja source of a chat template in place of the tokenizer's own; None: its own.
        chat_template_kwargs: Variables of the chat template, for chats that do not set them.
        gpus: GPUs of one replica, possibly a fraction; None for as many as `engine_args` spread the model over.
        bundles: Resource bundles of a replica that spans pods, first that of the replica's actor; None if it fits into
            one pod.
        autoscaling: Serve's `autoscaling_config` in place of a fixed number of `replicas`.
        tokens_required: Refuse to start without tokens. Tokens are not arguments, because Serve's configuration is
            widely readable: a replica takes them from its environment variables.
        tool_call_parser: Name of vLLM's tool parser; None: calls of tools are not parsed by replicas.
        reasoning_parser: Name of vLLM's reasoning parser; None: reasoning is part of the text of a response.
        self_check: What becomes of an engine that samples otherwise than it reports.
        weights: Initial weights that replace the model's own.
        application: Name of the application in Serve.
        drain_seconds: Maximum time in which a replica that is stopped answers its pending requests.
        own_url: Base URL at which clients on other machines reach the only replica; None: the address that Serve knows.
    """

    model: str
    tokenizer: str
    engine: str
    model_name: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, Any] | None = None
    replicas: int = 1
    max_ongoing_requests: int = 512
    gpus: float | None = None
    bundles: list[dict[str, float]] | None = None
    autoscaling: dict[str, Any] | None = None
    tokens_required: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    self_check: SelfCheck = "Require"
    weights: WeightsSource | None = None
    application: str = APPLICATION
    drain_seconds: float = 600.0
    own_url: str | None = None

    @classmethod
    def of(
        cls, generation: Generation, *, model: str | None = None, tokenizer: str | None = None, **more: Any
    ) -> ServeArgs:
        """Arguments for a job's generation.

        Args:
            model, tokenizer: Their locations on the serving machine; None for those in the job.
            more: Further fields, which depend on the placement of replicas.
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
            "chat_template": generation.model.chat_template,
            "chat_template_kwargs": generation.model.chat_template_kwargs,
            "simulated": simulated,
            "replicas": generation.replicas or 1,
            "max_ongoing_requests": generation.max_ongoing_requests,
            "autoscaling": autoscaling_config(generation.autoscaling),
            "tool_call_parser": generation.tool_call_parser,
            "reasoning_parser": generation.reasoning_parser,
            "self_check": generation.self_check,
        }
        return cls(**{**fields, **more})


def fewest_replicas(autoscaling: Autoscaling) -> int:
    """Minimum number of replicas while a shard is not done.

    At least one, because a turn would wait minutes for the first replica. All are stopped when the last shard is done.
    """
    return max(1, autoscaling.min_replicas)


def autoscaling_config(autoscaling: Autoscaling | None) -> dict[str, Any] | None:
    """Serve's `autoscaling_config`; None for a fixed number of replicas."""
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
    """Serve's `user_config` of the deployment: the part of its configuration that can change while it runs."""
    return {"weights": None if weights is None else {"uri": weights.uri, "version": weights.version}}


MOST_UNANSWERING: Final = 16
"""Replicas that a worker names at most, of those that do not answer it."""

PROBLEM_CHARACTERS: Final = 200
"""Maximum length of what is said of one of them, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnansweringReplica:
    """A replica of the policy that does not answer a worker.

    Attributes:
        url: Its base URL.
        since: Time of its last sign of life by the worker's clock, or from when it has been tried since, in whole
            seconds.
        problem: Why it counts as one that does not answer.
        requests: Requests that the worker had in flight there when it was found out, and open sessions of agents.
    """

    url: Annotated[str, StringConstraints(max_length=2048)]
    since: Timestamp
    problem: Annotated[str, StringConstraints(max_length=PROBLEM_CHARACTERS)] = ""
    requests: _Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodProgress:
    """Answer of a worker pod at `/progress`: counts of its shard, including the work of earlier pods.

    Attributes:
        failed: Trajectories that failed permanently in this pod; those of earlier pods are retried.
        planned: Number of trajectories that the shard will produce; 0 while the dataset is being read, or if it has no
            end.
        generating: Turns that are waiting for a response.
        policy_version: Version of the newest response; None if there was none.
        failure: Cause of the pod's first failed trajectory, with the line of the environment's code and the dataset's
            row; empty if none has failed.
        waiting: What the shard waits for: its policy, and why that does not answer, or its lock; empty: nothing.
        held: Why it begins no prompt groups although it could: it waits for the run's trainer; empty if it does not.
        starved: That the run's trainer waits for prompt groups; empty if it does not.
        answering: Replicas of the policy that the worker sends requests to; None: it has not begun to.
        unanswering: Those that do not answer it, the ones that have been silent for longest first.
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
    failure: _Failure = ""
    waiting: _Failure = ""
    held: _Failure = ""
    starved: _Failure = ""
    answering: _Count | None = None
    unanswering: Annotated[tuple[UnansweringReplica, ...], Field(max_length=MOST_UNANSWERING)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodWeights:
    """Answer of a generation pod at `/weights`.

    Attributes:
        wanted: Version that the job asks for.
        served: Version that it generates with; None if there is none, or it is unknown.
        problem: Why the wanted version is not served; None if it is, or is being loaded.
    """

    wanted: _Version | None = None
    served: _Version | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWeights:
    """Answer of the Serve application at `/v1/weights`.

    Attributes:
        wanted: Version that replicas are to serve.
        replicas: Version that each replica serves; None if unknown.
        problems: Why a replica does not serve the wanted version, by replica.
    """

    wanted: _Version | None = None
    replicas: Annotated[Mapping[str, _Version | None], Field(max_length=4096)]
    problems: Annotated[Mapping[str, str], Field(max_length=4096)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessage:
    """Termination message of a worker pod, and of the check pod.

    Attributes:
        shard: Its shard, 0 for the check; None if it ended before it knew its shard.
        planned, trajectories, failed, turns, generated_tokens, reward_sum: As in `PodProgress`, at the end.
        dropped: Trajectories of dropped groups.
        commit: The commit of the run's model at the hub; None: it has none, or it is unknown.
        done: True if the work was done.
        cause: Why it was not done, for the user; empty if it was.
    """

    shard: _Count | None = None
    planned: _Count = 0
    trajectories: _Count = 0
    failed: _Count = 0
    dropped: _Count = 0
    turns: _Count = 0
    generated_tokens: _Count = 0
    reward_sum: _Sum = 0.0
    commit: Commit | None = None
    done: bool = False
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentResult:
    """Result of one environment in a `FinishMessage`.

    Attributes:
        mean_reward: None if it has no trajectory.
        pass_at_1: None if its rewards have no success threshold.
    """

    trajectories: _Count = 0
    failed: _Count = 0
    mean_reward: _Sum | None = None
    pass_at_1: _Sum | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishMessage:
    """Termination message of the finish pod.

    Attributes:
        trajectories, failed, dropped: Numbers of the whole run.
        planned: Number of trajectories that the run was to produce.
        missing: Planned trajectories without any record.
        mean_reward: None if there is no trajectory.
        environments: Results by name of the environment, as many as fit into the message.
        environments_left_out: Number of those that do not fit.
        failure: Most frequent cause of failed trajectories, with the line of the environment's code; empty if none
            failed.
        cause: Why the run is not complete, for the user; empty if it is.
    """

    trajectories: _Count = 0
    failed: _Count = 0
    dropped: _Count = 0
    planned: _Count = 0
    missing: _Count = 0
    mean_reward: _Sum | None = None
    environments: Mapping[str, EnvironmentResult] = field(default_factory=dict)
    environments_left_out: _Count = 0
    failure: _Failure = ""
    cause: str = ""
