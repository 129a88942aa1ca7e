"""The RolloutJob resource, `kuberoll.io/v1alpha1`.

Python attributes are snake_case, the wire is camelCase; keys handed to vLLM (`engineArgs`) keep vLLM's spelling.
Every model refuses unknown fields and converts nothing: `"4"` is not an integer here, as it is not in Kubernetes.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from kuberoll_api.model.podparts import EnvFrom, EnvVar, PodTemplate, PullSecret, Toleration, Volume, VolumeMount
from kuberoll_api.model.traits import Traits
from kuberoll_api.model.types import (
    ENTRYPOINT_PATTERN,
    JOB_NAME_PATTERN,
    MAX_COUNT,
    MAX_NAME_LENGTH,
    MAX_SECONDS,
    MAX_SEED,
    PVC_PATTERN,
    VARIABLE_PATTERN,
    VERSION_PATTERN,
    Annotations,
    DnsLabel,
    DnsName,
    JsonObject,
    Labels,
    LongText,
    Model,
    Name,
    Quantity,
    Seconds,
    StopString,
    TrackingName,
    Url,
    keyed_by,
)

GROUP = "kuberoll.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "RolloutJob"


# Traits of fields.
IDENTITY = Traits(identity=True)
OPERATION = Traits(identity=False)
# How pods are made: not to be read where environments run, and nothing for one machine but variables and GPUs.
POD = Traits(identity=False, reader="Operator", place="Cluster")
POD_ANYWHERE = POD | Traits(place="Anywhere")
_LIFE = Traits(identity=False, change="AnyTime", reader="Operator", place="Cluster")
_WORK = Traits(change="Suspended", reader="Pods", place="Anywhere")


def _contradiction(message: str, *path: str | int) -> PydanticCustomError:
    """A mistake of several fields together; the path leads, from the model that finds it, to the one to change."""
    return PydanticCustomError("contradiction", "{message}", {"message": message, "path": path})


def _refuse_twins(names: list[Any], field: str, key: str) -> None:
    """Raises a contradiction where two items of a list have the same name."""
    for index, name in enumerate(names):
        if (first := names.index(name)) < index:
            message = f'found "{name}", the {key} of {field}[{first}] too; no two may have the same'
            raise _contradiction(message, field, index, key)


class ObjectMeta(Model):
    """The part of Kubernetes' ObjectMeta that a manifest may carry."""

    # What an API server adds to an exported object is accepted and not looked at.
    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, StringConstraints(pattern=JOB_NAME_PATTERN, min_length=1, max_length=MAX_NAME_LENGTH)] = Field(
        description="Name of the job: a DNS label as Services have it, short enough for the names of its children."
    )
    namespace: DnsLabel | None = Field(default=None, description="Namespace of the job; not used on a laptop.")
    labels: Labels = Field(default_factory=dict, description="Labels, to select the job by.")
    annotations: Annotations = Field(
        default_factory=dict, description="Notes for people and tools; not looked at here."
    )


class ModelSource(Model):
    """Which model generates."""

    source: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="Hub id, local directory (relative to the manifest), or s3:// or gs:// URI."
    )
    tokenizer: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = Field(
        default=None, description="Location of the tokenizer, if it is not with the model."
    )
    revision: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        default=None, description="Branch, tag or commit of a hub model."
    )


class Sampling(Model):
    """How tokens are sampled; a dataset row may override each of these."""

    temperature: float = Field(default=1.0, ge=0, le=2, description="Softmax temperature; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling mass.")
    top_k: int = Field(default=-1, ge=-1, le=1_000_000, description="Tokens considered; -1 and 0 mean all.")
    max_tokens: int = Field(
        default=512, ge=1, le=1_000_000, description="Maximum number of tokens generated in one turn."
    )
    stop: list[StopString] = Field(
        default_factory=list,
        max_length=64,
        description="Stop strings of the first turn, unless the dataset row has its own; included in the output.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SEED,
        description="Base of the per-trajectory sampling seeds; absent: derived from the job's name.",
    )
    greedy: bool = Field(default=False, description="Always take the most likely token, regardless of the temperature.")


class SimulatedEngine(Model):
    """A latency and batching model in the engine's place: dry runs and tests without a GPU."""

    responses: list[LongText] = Field(
        default_factory=list,
        max_length=1024,
        description="Texts of the answers, one drawn per request by its seed; none: random token ids.",
    )
    first_token_seconds: float = Field(default=0.0, ge=0, le=600, description="Median seconds to the first token.")
    token_seconds: float = Field(
        default=0.0, ge=0, le=60, description="Median seconds per further token, in a batch of one."
    )
    sigma: float = Field(
        default=0.0, ge=0, le=4, description="Spread of these times: the sigma of their lognormal distribution."
    )
    mean_tokens: int = Field(default=32, ge=1, le=1_000_000, description="Mean length of a random answer, tokens.")
    max_batch: int = Field(default=256, ge=1, le=1_000_000, description="Maximum batch size; further requests wait.")
    batch_slowdown: float = Field(
        default=0.0, ge=0, le=1, description="Relative slowdown of a token for each further request in the batch."
    )


class Autoscaling(Model):
    """Replicas that follow the load."""

    min_replicas: int = Field(default=1, ge=0, le=1024, description="Minimum number of replicas.")
    max_replicas: int = Field(ge=1, le=1024, description="Maximum number of replicas.")
    target_ongoing_requests: float = Field(
        default=64, gt=0, le=100_000, description="Target number of running and waiting requests per replica."
    )
    upscale_delay_seconds: float = Field(
        default=10, ge=0, le=86_400, description="Seconds for which more replicas must be needed before scaling up."
    )
    downscale_delay_seconds: float = Field(
        default=120, ge=0, le=86_400, description="Seconds for which fewer replicas must suffice before scaling down."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise _contradiction(
                f"found {self.min_replicas}, which is more than maxReplicas ({self.max_replicas})", "minReplicas"
            )
        return self


class Weights(Model):
    """Weights in place of the model's own; they may change while the job runs, and no trajectory is lost by it."""

    uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)] = Field(
        description="Location of the weights, in the model's own format: a directory that the replicas have "
        "mounted, or"
        "an s3:// or gs:// URI."
    )
    version: Annotated[str, StringConstraints(pattern=VERSION_PATTERN, max_length=63)] = Field(
        description="Name of these weights: every generated token is recorded with the version that produced it. "
        "Different weights need a different version; 0 is the model's own."
    )


class External(Model):
    """A policy endpoint that somebody else runs."""

    url: Annotated[Url, OPERATION] = Field(description="Base URL of the endpoint.")
    urls: Annotated[list[Url], OPERATION] = Field(
        default_factory=list,
        max_length=256,
        description="Base URLs of further replicas of the same policy; a trajectory's turns stay with one of them.",
    )
    api: Annotated[Literal["Auto", "KubeRoll", "OpenAI"], IDENTITY] = Field(
        default="Auto",
        description="Protocol of the endpoint: KubeRoll's own, or that of an OpenAI-compatible server (/v1/completions "
        "with token ids as prompt); Auto: ask the endpoint.",
    )
    model: Annotated[Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None, IDENTITY] = Field(
        default=None, description="The model's name at an OpenAI-compatible server; absent: the first that it lists."
    )
    api_key_variable: Annotated[
        Annotated[str, StringConstraints(pattern=VARIABLE_PATTERN, max_length=256)] | None, OPERATION
    ] = Field(
        default=None,
        description="Environment variable of the workers that holds the endpoint's API key (workers.env or envFrom, "
        "from a Secret).",
    )


class Resources(Model):
    """Kubernetes resource requirements."""

    limits: dict[str, Quantity] = Field(
        default_factory=dict, max_length=32, description="Maximum amounts that it may use."
    )
    requests: dict[str, Quantity] = Field(
        default_factory=dict, max_length=32, description="Amounts that are reserved for it."
    )


class PodOptions(Model):
    """How pods are made; for the operator, and not used on a laptop (except `env`)."""

    resources: Annotated[Resources, POD_ANYWHERE] = Field(
        default_factory=Resources, description="Requests and limits of the main container."
    )
    image: Annotated[Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None, POD] = Field(
        default=None, description="Container image; absent: the operator's default for this role."
    )
    image_pull_secrets: Annotated[list[PullSecret], POD] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra=keyed_by("name"),
        description="Secrets to pull the image with, as in a pod.",
    )
    env: Annotated[list[EnvVar], POD_ANYWHERE] = Field(
        default_factory=list,
        max_length=256,
        json_schema_extra=keyed_by("name"),
        description="Environment variables, as in a container.",
    )
    env_from: Annotated[list[EnvFrom], POD] = Field(
        default_factory=list, max_length=64, description="Sources of environment variables, as in a container."
    )
    volumes: Annotated[list[Volume], POD] = Field(
        default_factory=list,
        max_length=64,
        json_schema_extra=keyed_by("name"),
        description="Volumes, as in a pod; kinds that are not listed here can be set in podTemplate.",
    )
    volume_mounts: Annotated[list[VolumeMount], POD] = Field(
        default_factory=list,
        max_length=64,
        json_schema_extra=keyed_by("mountPath"),
        description="Mounts of these volumes in the main container, as in a container.",
    )
    node_selector: Annotated[Labels, POD] = Field(default_factory=dict, description="Labels that a node must have.")
    tolerations: Annotated[list[Toleration], POD] = Field(
        default_factory=list, max_length=64, description="Taints that are tolerated, as in a pod."
    )
    service_account_name: Annotated[DnsName | None, POD] = Field(
        default=None,
        description="Service account of the pods, which never get its token. Absent: the namespace's default.",
    )
    runtime_class_name: Annotated[DnsName | None, POD] = Field(
        default=None, description="RuntimeClass of the pods: gVisor or Kata for untrusted code."
    )
    priority_class_name: Annotated[DnsName | None, POD] = Field(default=None, description="PriorityClass of the pods.")
    pod_labels: Annotated[Labels, POD] = Field(
        default_factory=dict, description="Further labels of the pods; the operator's own take precedence."
    )
    pod_annotations: Annotated[Annotations, POD] = Field(default_factory=dict, description="Annotations of the pods.")
    pod_template: Annotated[PodTemplate | None, POD] = Field(
        default=None, description="A pod template merged over the rendered one, for everything else."
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for field, key in (
            ("image_pull_secrets", "name"),
            ("env", "name"),
            ("volumes", "name"),
            ("volume_mounts", "mountPath"),
        ):
            _refuse_twins([item[key] for item in getattr(self, field)], to_camel(field), key)
        return self


class Generation(PodOptions):
    """The policy: which model, on which engine, how many replicas, sampled how."""

    backend: Annotated[Literal["Auto", "KubeRay", "Native", "External"], OPERATION] = Field(
        default="Auto",
        description="How the engine is run: by KubeRay, in plain Deployments (Native), or outside the job (External). "
        "Auto: KubeRay if the cluster serves its CRD, else Native. `kuberoll run` treats all but External as "
        "local.",
    )
    model: Annotated[ModelSource, IDENTITY] = Field(description="The model that generates.")
    engine: Annotated[Literal["VLLM", "Simulated"], IDENTITY] = Field(
        default="VLLM", description="vLLM, or a simulation of its latency."
    )
    engine_args: Annotated[JsonObject, IDENTITY] = Field(
        default_factory=dict, description="Arguments passed to vLLM unchanged, in its spelling (max_model_len, ...)."
    )
    simulated: Annotated[SimulatedEngine | None, IDENTITY] = Field(
        default=None, description="Settings of the Simulated engine."
    )
    sampling: Annotated[Sampling, IDENTITY] = Field(default_factory=Sampling, description="Sampling parameters.")
    replicas: Annotated[int | None, OPERATION] = Field(
        default=None, ge=1, le=1024, description="Engine replicas; absent: 1."
    )
    autoscaling: Annotated[Autoscaling | None, OPERATION] = Field(
        default=None, description="Replicas that follow the load, instead of a fixed number."
    )
    gpus_per_replica: Annotated[float | None, OPERATION] = Field(
        default=None,
        gt=0,
        le=1024,
        description="GPUs of one engine replica; absent: tensor_parallel_size times pipeline_parallel_size of "
        "engineArgs. A fraction lets replicas share a GPU (backend KubeRay).",
    )
    max_ongoing_requests: Annotated[int, OPERATION] = Field(
        default=512, ge=1, le=100_000, description="Maximum number of concurrent requests of one replica."
    )
    routing: Annotated[Literal["Session", "LeastLoaded"], OPERATION] = Field(
        default="Session",
        description="Session: turns of a trajectory stay with the replica that has their prefix cached. "
        "LeastLoaded: each"
        "turn goes to the replica with the least load.",
    )
    external: External | None = Field(default=None, description="The endpoint, with backend External.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.replicas is not None and self.autoscaling is not None:
            raise _contradiction("excludes autoscaling; remove one of the two", "replicas")
        if self.backend == "External" and self.external is None:
            raise _contradiction("External needs external.url, the endpoint to use", "backend")
        if self.backend != "External" and self.external is not None:
            raise _contradiction("is only for backend External; set backend: External, or remove it", "external")
        if self.engine != "Simulated" and self.simulated is not None:
            raise _contradiction("is only for engine Simulated; set engine: Simulated, or remove it", "simulated")
        return self


_SandboxPath = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^(/|~|\.)")]


class EnvironmentAccess(Model):
    """What the processes of an environment may use beyond what they have anyway, with isolation Process."""

    variables: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]] = Field(
        default_factory=list, max_length=64, description="Environment variables that they inherit from the worker."
    )
    readable_paths: list[_SandboxPath] = Field(
        default_factory=list,
        max_length=64,
        description="Further files and directories that they may read, such as some below /tmp or in the home "
        "directory.",
    )
    writable_paths: list[_SandboxPath] = Field(
        default_factory=list,
        max_length=64,
        description="Files and directories that they may change, in addition to a temporary directory of their own.",
    )


BuiltInEnvironment = Literal["calculator", "math", "sliding_puzzle"]
"""Environments that the workers bring; your own are named by `entrypoint`."""


class Environment(Model):
    """One environment, and the dataset rows that it answers (by `task_name`)."""

    name: Annotated[Name, IDENTITY] = Field(
        description="The `task_name` of the dataset rows that this environment answers."
    )
    type: Annotated[BuiltInEnvironment | None, IDENTITY] = Field(default=None, description="A built-in environment.")
    entrypoint: Annotated[
        Annotated[str, StringConstraints(pattern=ENTRYPOINT_PATTERN, max_length=512)] | None, IDENTITY
    ] = Field(default=None, description="Your own environment class, `package.module:Class`.")
    config: Annotated[JsonObject, IDENTITY] = Field(
        default_factory=dict, description="Argument of the environment's constructor."
    )
    isolation: Annotated[Literal["Inline", "Process"], OPERATION] = Field(
        default="Inline",
        description="Inline: a thread of the worker. Process: child processes, killed when a step times out.",
    )
    processes: Annotated[int, OPERATION] = Field(
        default=1, ge=1, le=256, description="Child processes per worker, with isolation Process."
    )
    access: Annotated[EnvironmentAccess, OPERATION] = Field(
        default_factory=EnvironmentAccess,
        description="Variables and paths that child processes may use in addition to the usual ones.",
    )
    max_batch: Annotated[int, OPERATION] = Field(
        default=256, ge=1, le=65536, description="Maximum number of trajectories in one call of step."
    )
    step_timeout_seconds: Annotated[Seconds, OPERATION] = Field(
        default=30.0, description="Maximum duration of one call of step."
    )
    repeats: Annotated[int | None, IDENTITY] = Field(
        default=None, ge=1, le=65536, description="Samples per prompt of this environment; absent: dataset.repeats."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.type is None) == (self.entrypoint is None):
            found = "neither" if self.type is None else "both"
            raise _contradiction(f"set one of type (a built-in) and entrypoint (package.module:Class); found {found}")
        return self


class GeneratorSource(Model):
    """Rows made by environments themselves, through `generate_dataset(count, seed)`."""

    environments: list[Name] = Field(
        default_factory=list, max_length=64, description="Environments that generate rows, in this order; none: all."
    )
    count: int = Field(ge=1, le=100_000_000, description="Rows of each environment.")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Seed of the generator.")


class ConfigMapSource(Model):
    """Rows in a ConfigMap."""

    name: DnsLabel = Field(description="Name of the ConfigMap, in the job's namespace.")
    key: Annotated[str, StringConstraints(min_length=1, max_length=253)] = Field(
        default="dataset.jsonl", description="Key that holds the rows as JSON lines."
    )


class PersistentVolumeSource(Model):
    """Rows in a file on a persistent volume."""

    claim_name: DnsLabel = Field(description="Name of the PersistentVolumeClaim, in the job's namespace.")
    path: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="Path of the file inside the volume."
    )


class HuggingFaceSource(Model):
    """Rows of a dataset of the Hugging Face hub, through the `datasets` package; streamed."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="Hub id, or a local directory that `datasets` can load (relative to the manifest)."
    )
    config: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        default=None, description="Configuration of the dataset, if it has several."
    )
    split: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        default="train", description="Split of the dataset."
    )
    revision: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        default=None, description="Branch, tag or commit of the dataset."
    )


class DatasetSource(Model):
    """Where the prompts come from: exactly one of these."""

    # Not a rule in CEL, which does not see `rows`: what is free in form has no type there.
    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)] | None = Field(
        default=None,
        description="A file of JSON lines (also .gz, .zst) or Parquet, or a directory or pattern of such files: a path "
        "(relative to the manifest), or a URI of any fsspec file system (s3://, gs://, https://, ...).",
    )
    huggingface: HuggingFaceSource | None = Field(default=None, description="A dataset of the Hugging Face hub.")
    rows: list[JsonObject] | None = Field(default=None, max_length=10_000, description="Rows written in the manifest.")
    generator: GeneratorSource | None = Field(default=None, description="Rows made by the environments.")
    config_map: ConfigMapSource | None = Field(default=None, description="Rows in a ConfigMap; cluster only.")
    pvc: PersistentVolumeSource | None = Field(default=None, description="Rows on a volume; cluster only.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        fields = type(self).model_fields
        given = [to_camel(name) for name in fields if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise _contradiction(f"set one of {', '.join(map(to_camel, fields))}; found {found}")
        return self


class PromptTemplate(Model):
    """Makes messages from a row's fields: `{question}` is replaced, `{{` and `}}` are braces."""

    system: LongText | None = Field(default=None, description="The system message.")
    user: LongText = Field(description="The user message.")


class Dataset(Model):
    """The prompts, and how many samples each gets."""

    source: Annotated[DatasetSource, OPERATION] = Field(description="Source of the rows.")
    limit: Annotated[int | None, IDENTITY] = Field(
        default=None, ge=1, le=MAX_COUNT, description="Use only the first rows; absent: all."
    )
    repeats: Annotated[int, IDENTITY] = Field(
        default=1, ge=1, le=65536, description="Samples per prompt: the size of a prompt group."
    )
    seed_per_repeat: Annotated[bool, IDENTITY] = Field(
        default=True,
        description="Give every trajectory its own sampling seed, so that a run is reproducible; false: random.",
    )
    prompt_template: Annotated[PromptTemplate | None, IDENTITY] = Field(
        default=None, description="Template of the prompt for rows that have neither `messages` nor `prompt`."
    )


class Retries(Model):
    """How often, and how patiently, a failed step is tried again within its turn."""

    generation_attempts: int = Field(
        default=30,
        ge=1,
        le=1000,
        description="Attempts of one generation request if the endpoint is at fault; the default outlasts a "
        "replica that"
        "takes ten minutes to restart.",
    )
    environment_attempts: int = Field(default=2, ge=1, le=1000, description="Attempts of one environment step.")
    backoff_seconds: float = Field(
        default=0.5, ge=0, le=600, description="Seconds before the second attempt; doubled for each further one."
    )
    max_backoff_seconds: float = Field(default=30.0, ge=0, le=3600, description="Maximum seconds between attempts.")


class Timeouts(Model):
    """How long things may take. What takes longer is stopped, its request aborted, and recorded as failed."""

    generation_seconds: Seconds = Field(
        default=600.0, description="Time limit of one generation request, including waiting."
    )
    turn_seconds: Seconds | None = Field(
        default=None,
        description="Time limit of one turn, including all retries of generation and environment; absent: none.",
    )
    trajectory_seconds: Seconds | None = Field(default=None, description="Time limit of one trajectory; absent: none.")


class Groups(Model):
    """Prompt groups, the samples of one prompt: which of them count."""

    oversample: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="Samples started per prompt in addition to dataset.repeats. The first to finish are kept, "
        "the others"
        "are stopped and go to dropped.jsonl: faster, but biased towards short trajectories.",
    )
    atomic: bool = Field(
        default=False,
        description="All samples of a prompt or none: if one fails permanently, its group fails with it.",
    )
    drop_equal_rewards: bool = Field(
        default=False,
        description="Drop groups whose rewards are all equal: they have no advantage to learn from. They go to "
        "dropped.jsonl.",
    )
    drop_budget: int | None = Field(
        default=None,
        ge=0,
        le=MAX_COUNT,
        description="Maximum number of groups that dropEqualRewards may drop; absent: no limit.",
    )
    wanted: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Number of kept groups at which to stop; each dropped group is replaced by the dataset's next. "
        "Absent: the whole dataset.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.drop_budget is not None and not self.drop_equal_rewards:
            raise _contradiction(
                "is the budget of dropEqualRewards; set dropEqualRewards: true, or remove it", "dropBudget"
            )
        return self


class Rollout(Model):
    """The loop: generate, step the environments, reward, repeat."""

    scheduling: Annotated[Literal["Concurrent", "Lockstep"], OPERATION] = Field(
        default="Concurrent",
        description="Concurrent: every trajectory at its own pace. Lockstep: batches of `concurrency`, turn by turn.",
    )
    max_turns: Annotated[int, IDENTITY] = Field(
        default=20, ge=1, le=1_000_000, description="Maximum turns per trajectory."
    )
    max_sequence_length: Annotated[int | None, IDENTITY] = Field(
        default=None, ge=2, le=100_000_000, description="Maximum tokens per trajectory; absent: the engine's window."
    )
    concurrency: Annotated[int, OPERATION] = Field(
        default=256, ge=1, le=100_000, description="Trajectories in flight per worker."
    )
    observation_template: Annotated[Literal["Raw", "ChatTemplate"], IDENTITY] = Field(
        default="Raw",
        description="Raw: an observation's tokens are appended unchanged. ChatTemplate: with the role "
        "boundaries of the"
        "model's chat template.",
    )
    groups: Annotated[Groups, IDENTITY] = Field(
        default_factory=Groups, description="Rules for the samples of a prompt."
    )
    journal_turns: Annotated[bool, OPERATION] = Field(
        default=True,
        description="Write every turn to disk, so that an interrupted trajectory resumes after its last complete turn.",
    )
    retries: Annotated[Retries, OPERATION] = Field(default_factory=Retries, description="Retries of failed steps.")
    timeouts: Annotated[Timeouts, OPERATION] = Field(default_factory=Timeouts, description="Time limits.")
    max_failed_fraction: Annotated[float, OPERATION] = Field(
        default=0.0, ge=0, le=1, description="The failure budget: fraction of trajectories that may fail permanently."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for given, name in ((self.groups.atomic, "atomic"), (self.groups.drop_equal_rewards, "dropEqualRewards")):
            if given and not self.journal_turns:
                message = f"groups.{name} needs it: results that wait for their group are kept there; remove one"
                raise _contradiction(message, "journalTurns")
        return self


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


class OutputParts(Model):
    """Objects in an object store, which cannot be appended to; a directory has none."""

    max_bytes: int = Field(
        default=32 << 20, ge=1 << 10, le=1 << 30, description="Size at which a part is written, bytes."
    )
    max_seconds: float = Field(
        default=15.0,
        gt=0,
        le=3600,
        description="Maximum seconds that a trajectory waits for its part to be written; until then a crash loses it.",
    )


class WandbTracking(Model):
    """A run at Weights & Biases; who is logged in, WANDB_API_KEY and WANDB_MODE are as everywhere."""

    project: TrackingName = Field(description="The project.")
    entity: TrackingName | None = Field(default=None, description="User or team; absent: the default one.")
    group: TrackingName | None = Field(default=None, description="Group of runs.")
    name: TrackingName | None = Field(default=None, description="Name of the run; absent: the job's.")
    tags: list[Annotated[str, StringConstraints(min_length=1, max_length=64)]] = Field(
        default_factory=list, max_length=64, description="Tags of the run."
    )


class MlflowTracking(Model):
    """A run in an MLflow store; credentials come from MLflow's environment variables."""

    tracking_uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)] = Field(
        description="The store: http://..., sqlite:///..., databricks."
    )
    experiment: TrackingName = Field(description="Name of the experiment; created if it does not exist.")
    run_name: TrackingName | None = Field(default=None, description="Name of the run; absent: the job's.")


class Tracking(Model):
    """Experiment trackers that are told of the run when it ends; one that cannot be told never fails it."""

    wandb: WandbTracking | None = Field(default=None, description="Weights & Biases.")
    mlflow: MlflowTracking | None = Field(default=None, description="MLflow.")
    trajectories: bool = Field(default=False, description="Upload the shards, too.")

    @model_validator(mode="after")
    def _some_tracker(self) -> Self:
        if self.wandb is None and self.mlflow is None:
            raise _contradiction("set wandb or mlflow, or both; found neither")
        return self


class Output(Model):
    """Destination of the trajectories."""

    uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)] | None = Field(
        default=None,
        description="URI of an object store (s3://, gs://, abfs:// or any other of fsspec); in a cluster also "
        "pvc://CLAIM[/path], a directory of a PersistentVolumeClaim; with `kuberoll run` also a directory "
        "(relative to the working directory). Absent: runs/<job's name> with `kuberoll run`.",
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
            raise _contradiction(
                f'found "{self.uri}"; write pvc://CLAIM or pvc://CLAIM/path, with the name of a PersistentVolumeClaim '
                "and a path without . and ..",
                "uri",
            )
        return self


class RolloutJobSpec(Model):
    """Specification of the job."""

    suspend: Annotated[bool, _LIFE] = Field(
        default=False, description="Stop the job; trajectories in flight are finished first. As in batch/v1."
    )
    managed_by: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=253)] | None, _LIFE | Traits(change="Never")
    ] = Field(default=None, description="The controller that manages this job, as in batch/v1; immutable.")
    active_deadline_seconds: Annotated[int | None, _LIFE] = Field(
        default=None, ge=1, le=MAX_SECONDS, description="Maximum duration of the job, after which it fails."
    )
    startup_deadline_seconds: Annotated[int, _LIFE | Traits(reader="Pods", place="Anywhere")] = Field(
        default=1800,
        ge=1,
        le=7 * 86400,
        description="Maximum duration of each step of the start, after which the job fails: the check, then "
        "generation,"
        "then the first worker.",
    )
    ttl_seconds_after_finished: Annotated[int | None, _LIFE] = Field(
        default=None,
        ge=0,
        le=MAX_SECONDS,
        description="Seconds after its end at which the job is deleted; absent: never.",
    )
    generation: Annotated[Generation, _WORK] = Field(description="The policy: model, engine and replicas.")
    weights: Annotated[Weights | None, _WORK | Traits(identity=False, change="AnyTime")] = Field(
        default=None,
        description="Weights that replace the model's own; may change while the job runs.",
    )
    environments: Annotated[list[Environment], _WORK] = Field(
        min_length=1, max_length=64, json_schema_extra=keyed_by("name"), description="The environments."
    )
    dataset: Annotated[Dataset, _WORK] = Field(description="The prompts.")
    rollout: Annotated[Rollout, _WORK] = Field(default_factory=Rollout, description="The multi-turn loop.")
    workers: Annotated[Workers, _WORK | OPERATION] = Field(
        default_factory=Workers, description="The environment workers."
    )
    output: Annotated[Output, _WORK | OPERATION] = Field(
        default_factory=Output, description="Destination of the trajectories."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [environment.name for environment in self.environments]
        _refuse_twins(names, "environments", "name")
        if self.rollout.groups.drop_equal_rewards:
            repeats = [item.repeats or self.dataset.repeats for item in self.environments]
            if 1 in repeats:
                name = names[repeats.index(1)]
                message = f"the groups of {name} are of one sample, so all their rewards are equal; raise its repeats"
                raise _contradiction(message, "rollout", "groups", "dropEqualRewards")
        if self.weights is not None and self.generation.backend == "External":
            raise _contradiction("is not for backend External, whose weights are somebody else's; remove it", "weights")
        generator = self.dataset.source.generator
        for index, name in enumerate(generator.environments if generator else ()):
            if name not in names:
                message = f'found "{name}"; it must be the name of an environment: {", ".join(names)}'
                raise _contradiction(message, "dataset", "source", "generator", "environments", index)
        return self


class RolloutJob(Model):
    """One job of rollouts: a model, its environments, a dataset, and where the trajectories go."""

    api_version: Literal["kuberoll.io/v1alpha1"] = Field(description="The version of this API.")
    kind: Literal["RolloutJob"] = Field(description="The kind of this object.")
    metadata: ObjectMeta = Field(description="Kubernetes object metadata.")
    spec: RolloutJobSpec = Field(description="Specification of the job.")
    status: JsonObject | None = Field(default=None, description="Written by the operator; not read here.")
