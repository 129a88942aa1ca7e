"""The policy: model, engine, replicas, sampling, and weights that may change."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from kuberoll_api.model.access import MAX_ACCESS, PolicyAccess
from kuberoll_api.model.chat_template import NO_TEMPLATE, RESERVED_VARIABLES
from kuberoll_api.model.contradictions import contradiction, reject_duplicates
from kuberoll_api.model.pods import PodOptions
from kuberoll_api.model.sampling_fields import SAMPLING_FIELDS
from kuberoll_api.model.traits import IDENTITY, OPERATION, POD, Traits
from kuberoll_api.model.types import (
    VARIABLE_PATTERN,
    VERSION_PATTERN,
    JsonObject,
    LongText,
    Model,
    StopString,
    Url,
    keyed_by,
)

SelfCheck = Literal["Require", "Warn", "Skip"]


class ModelFiles(Model):
    """A model: the places of its weights and its tokenizer."""

    source: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="Hub id, local directory (relative to the manifest), or s3:// or gs:// URI."
    )
    tokenizer: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = Field(
        default=None, description="Location of the tokenizer, if it is not with the model."
    )
    revision: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        default=None, description="Branch, tag or commit of a hub model."
    )
    cache: Annotated[bool, POD] = Field(
        default=True,
        description="Take it from the cluster's model cache, if there is one; false: each engine fetches it itself.",
    )


class ModelSource(ModelFiles):
    """The model that generates."""

    chat_template: LongText | None = Field(
        default=None,
        description="Jinja source of a chat template in place of the tokenizer's own: for the job's prompts and "
        "observations, and for chats at the policy's endpoint.",
    )
    chat_template_kwargs: JsonObject = Field(
        default_factory=dict,
        description="Variables of the chat template, such as `enable_thinking: false`: for the job's prompts "
        "and observations, and the default of chats at the policy's endpoint.",
    )

    @model_validator(mode="after")
    def _template(self) -> Self:
        # What has neither is the name of a file, which the policy's server would look for.
        if self.chat_template is not None and not any(mark in self.chat_template for mark in ("{{", "{%")):
            raise contradiction(NO_TEMPLATE, "chatTemplate")
        return self

    @model_validator(mode="after")
    def _variables(self) -> Self:
        for name in self.chat_template_kwargs:
            if name in RESERVED_VARIABLES or not name.isidentifier():
                raise contradiction(
                    "is not a variable of your own: the rendering of chat templates sets it",
                    *("chatTemplateKwargs", name),
                )
        return self


class StructuredOutputs(Model):
    """Form that every response must have: exactly one of these fields."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    json_schema: JsonObject | None = Field(default=None, alias="json", description="A JSON schema.")
    regex: Annotated[str, StringConstraints(min_length=1, max_length=65536)] | None = Field(
        default=None, description="A regular expression that the whole response matches."
    )
    choice: list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]] | None = Field(
        default=None, min_length=1, max_length=1024, description="The texts of which the response is one."
    )
    grammar: Annotated[str, StringConstraints(min_length=1, max_length=65536)] | None = Field(
        default=None, description="A context-free grammar in EBNF."
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        infos = type(self).model_fields.items()
        given = [str(info.alias) for name, info in infos if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise contradiction(f"set one of {', '.join(str(info.alias) for _, info in infos)}; found {found}")
        return self


def _sampling_field(name: str, description: str) -> Any:
    """A field of `Sampling`, with the default and the bounds of the table."""
    field = SAMPLING_FIELDS[name]
    bounds: dict[str, Any] = field.bounds
    return Field(default=field.default, description=description, **bounds)


class Sampling(Model):
    """Sampling parameters; a dataset row may override each of them."""

    override: bool = Field(
        default=False,
        description="These settings apply to all rows: the rows' own sampling is ignored, but not their stop_strings.",
    )

    temperature: float = _sampling_field("temperature", "Softmax temperature; 0 is greedy.")
    top_p: float = _sampling_field("top_p", "Nucleus sampling mass.")
    top_k: int = _sampling_field("top_k", "Tokens considered; -1 and 0 mean all.")
    max_tokens: int = _sampling_field("max_tokens", "Maximum number of tokens generated in one turn.")
    stop: list[StopString] = Field(
        default_factory=list,
        max_length=64,
        description="Stop strings of the first turn, unless the dataset row has its own; included in the output.",
    )
    seed: int | None = _sampling_field(
        "seed", "Base of the per-trajectory sampling seeds; absent: derived from the job's name."
    )
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(
        default_factory=list, max_length=64, description="Token ids that end a response, besides the model's own."
    )
    min_p: float = _sampling_field("min_p", "Minimum probability of a token, relative to the most likely one.")
    presence_penalty: float = _sampling_field("presence_penalty", "Penalty of tokens that the response has already.")
    frequency_penalty: float = _sampling_field(
        "frequency_penalty", "The same for each time that the response has them."
    )
    repetition_penalty: float = _sampling_field(
        "repetition_penalty", "Factor against tokens that the prompt or the response has already."
    )
    min_tokens: int = _sampling_field("min_tokens", "Minimum number of tokens of a response before it may stop.")
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="Form that every response must have; absent: any."
    )
    greedy: bool = Field(default=False, description="Always take the most likely token, regardless of the temperature.")


class SimulatedEngine(Model):
    """A latency and batching model instead of an engine: for dry runs and tests without a GPU."""

    responses: list[LongText] = Field(
        default_factory=list,
        max_length=1024,
        description="Texts of the responses, one chosen per request by its seed; none: random token ids.",
    )
    first_token_seconds: float = Field(default=0.0, ge=0, le=600, description="Median seconds to the first token.")
    token_seconds: float = Field(
        default=0.0, ge=0, le=60, description="Median seconds per further token, in a batch of one."
    )
    sigma: float = Field(
        default=0.0, ge=0, le=4, description="Spread of these times: the sigma of their lognormal distribution."
    )
    mean_tokens: int = Field(default=32, ge=1, le=1_000_000, description="Mean length of a random response, in tokens.")
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
            raise contradiction(
                f"found {self.min_replicas}, which is more than maxReplicas ({self.max_replicas})", "minReplicas"
            )
        return self


class Weights(Model):
    """Weights that replace the model's own; they may change while the job runs, without losing trajectories."""

    uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)] = Field(
        description="Location of the weights, in the model's own format: a directory that is mounted in the replicas, "
        "or an s3:// or gs:// URI."
    )
    version: Annotated[str, StringConstraints(pattern=VERSION_PATTERN, max_length=63)] = Field(
        description="Name of these weights: every generated token is recorded with the version that produced it. "
        "Different weights need a different version; 0 is the model's own."
    )


class External(Model):
    """A policy endpoint that is managed externally."""

    url: Annotated[Url, OPERATION] = Field(description="Base URL of the endpoint.")
    urls: Annotated[list[Url], OPERATION] = Field(
        default_factory=list,
        max_length=256,
        description="Base URLs of further replicas of the same policy; a trajectory's turns stay with one of them.",
    )
    api: Annotated[Literal["Auto", "KubeRoll", "OpenAI"], IDENTITY] = Field(
        default="Auto",
        description="Protocol of the endpoint: KubeRoll's own, or that of an OpenAI-compatible server (/v1/completions "
        "with token ids as prompt); Auto: detect it.",
    )
    model: Annotated[Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None, IDENTITY] = Field(
        default=None, description="The model's name at an OpenAI-compatible server; absent: the first that it lists."
    )
    api_key_variable: Annotated[
        Annotated[str, StringConstraints(pattern=VARIABLE_PATTERN, max_length=256)] | None, OPERATION
    ] = Field(
        default=None,
        description="Environment variable of the workers that holds the endpoint's API key (workers.env, from a "
        "Secret).",
    )


# Pods do not receive them: a replica serves alike, whatever their number.
_SCALE: Final = OPERATION | Traits(change="AnyTime", reader="Operator")

ParserName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)]


BackendName = Literal["KubeRay", "Native", "External"]
"""Ways to run the engine; the operator has a module for each in `backends`."""


class Generation(PodOptions):
    """The policy: model, engine, number of replicas and sampling."""

    container_name: ClassVar[str] = "generation"

    backend: Annotated[Literal["Auto", BackendName], OPERATION] = Field(
        default="Auto",
        description="How the engine is run: by KubeRay, in plain Deployments (Native), or outside the job (External). "
        "Auto: KubeRay if the cluster serves its CRD, else Native. `kuberoll run` treats all but "
        "External as local.",
    )
    model: Annotated[ModelSource, IDENTITY] = Field(description="The model that generates.")
    engine: Annotated[Literal["VLLM", "Simulated"], IDENTITY] = Field(
        default="VLLM", description="vLLM, or a simulation of its latency."
    )
    engine_args: Annotated[JsonObject, IDENTITY] = Field(
        default_factory=dict, description="Arguments passed to vLLM unchanged, in its spelling (max_model_len, ...)."
    )
    tool_call_parser: Annotated[ParserName | None, IDENTITY] = Field(
        default=None,
        description="Name of the vLLM tool parser that fits the model, as in vLLM's --tool-call-parser (`hermes`, "
        "`llama3_json`, `mistral`, ...), for rows and environments that declare tools, and for agents that call the "
        "endpoint. Absent, or with another engine: calls in rollouts are JSON objects between `<tool_call>` and "
        "`</tool_call>`.",
    )
    reasoning_parser: Annotated[ParserName | None, IDENTITY] = Field(
        default=None,
        description="Name of the vLLM reasoning parser that fits the model, as in vLLM's --reasoning-parser (`qwen3`, "
        "`deepseek_r1`, ...), for agents that call the endpoint. Absent: reasoning is part of a message's content.",
    )
    self_check: Annotated[SelfCheck, OPERATION] = Field(
        default="Require",
        description="What becomes of an engine whose own scores contradict what it samples, which it proves at its "
        "start and after each change of weights: Require does not start it, or stops it; Warn logs it; Skip does not "
        "check. Bounds of precision only warn for kinds of engines on which they were not measured, as all on GPUs.",
    )
    simulated: Annotated[SimulatedEngine | None, IDENTITY] = Field(
        default=None, description="Settings of the Simulated engine."
    )
    sampling: Annotated[Sampling, IDENTITY] = Field(default_factory=Sampling, description="Sampling parameters.")
    replicas: Annotated[int | None, _SCALE] = Field(
        default=None,
        ge=1,
        le=1024,
        description="Engine replicas; absent: 1. May change while the job runs, but not with backend KubeRay.",
    )
    autoscaling: Annotated[Autoscaling | None, _SCALE] = Field(
        default=None, description="Replicas that follow the load, instead of a fixed number. May change as replicas."
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
        "LeastLoaded: each turn goes to the replica with the least load.",
    )
    access: Annotated[list[PolicyAccess], POD] = Field(
        default_factory=list,
        max_length=MAX_ACCESS,
        json_schema_extra=keyed_by("name"),
        description="Pods outside the job that may use the policy, each with a token of its own. No others get "
        "through the NetworkPolicy, but the job's workers and environments.",
    )
    external: External | None = Field(default=None, description="The endpoint, with backend External.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sampling.min_tokens > self.sampling.max_tokens:
            raise contradiction(
                f"found {self.sampling.min_tokens}, which is more than maxTokens ({self.sampling.max_tokens})",
                *("sampling", "minTokens"),
            )
        if self.replicas is not None and self.autoscaling is not None:
            raise contradiction("excludes autoscaling; remove one of the two", "replicas")
        if self.backend == "External" and self.external is None:
            raise contradiction("External needs external.url, the endpoint to use", "backend")
        if self.backend != "External" and self.external is not None:
            raise contradiction("is only for backend External; set backend: External, or remove it", "external")
        if self.engine != "Simulated" and self.simulated is not None:
            raise contradiction("is only for engine Simulated; set engine: Simulated, or remove it", "simulated")
        if self.backend == "External" and self.tool_call_parser is not None:
            raise contradiction(
                "is for engines of the job; an external policy's responses are searched for plain tags: remove it",
                "toolCallParser",
            )
        if self.backend == "External" and self.reasoning_parser is not None:
            raise contradiction("is for engines of the job, not for an external policy: remove it", "reasoningParser")
        if self.backend == "External" and self.access:
            raise contradiction(
                "is for a policy in pods of the job; who reaches an external one is said where it is run: remove it",
                "access",
            )
        reject_duplicates([item.name for item in self.access], "access", "name")
        return self
