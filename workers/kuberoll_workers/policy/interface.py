"""The interface of a policy: token ids in, token ids and their log-probabilities out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol

import msgspec

from kuberoll_api.model.sampling_fields import SAMPLING_FIELDS
from kuberoll_workers.data.causes import NO_EVIDENCE, Cause, Evidence, ReasonName
from kuberoll_workers.data.tool_calls import ToolCalls
from kuberoll_workers.data.tools import Tool
from kuberoll_workers.policy.forms import MAX_CHOICE, MAX_CHOICES, MAX_TEXT

FinishReason = Literal["stop", "length", "abort"]


MAX_STOPS = 256
"""Maximum number of stop strings, and of stop tokens, of a request; and the maximum length of one, characters."""
MAX_STOP = 4096

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


_Choice = Annotated[str, msgspec.Meta(max_length=MAX_CHOICE)]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Form that a response must have: exactly one of the fields is set.

    Attributes:
        json: A JSON schema.
        regex: A regular expression that the whole response matches.
        choice: The texts of which the response is one.
        grammar: A context-free grammar in EBNF.
    """

    json: Annotated[dict[str, Any], msgspec.Meta(max_length=1024)] | None = None
    regex: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] | None = None
    choice: Annotated[list[_Choice], msgspec.Meta(max_length=MAX_CHOICES)] | None = None
    grammar: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] | None = None

    def __post_init__(self) -> None:
        if sum(getattr(self, name) is not None for name in self.__struct_fields__) != 1:
            raise ValueError(f"set one of {', '.join(self.__struct_fields__)}")


def _bounded(name: str) -> msgspec.Meta:
    bounds: dict[str, Any] = SAMPLING_FIELDS[name].bounds
    return msgspec.Meta(**bounds)


def _default(name: str) -> Any:
    """The default of a field: a float of its own.

    msgspec leaves out values that are the default's object: what a job or a row sets is then always written, wherever
    the value came from, and a stored digest of the settings does not depend on that.
    """
    default = SAMPLING_FIELDS[name].default
    return float(str(default)) if isinstance(default, float) else default


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters of one response, in memory and on the wire, where the bounds are checked.

    Stop strings apply to this request only and are included in the output. `temperature` 0 is greedy. Defaults are not
    sent, so that a replica of an older version understands what it can honor. The fields are those of
    `SAMPLING_FIELDS`, which has their defaults and bounds.
    """

    # What is left of a window may be nothing.
    max_tokens: Annotated[int, msgspec.Meta(ge=0)]
    temperature: Annotated[float, _bounded("temperature")] = _default("temperature")
    top_p: Annotated[float, _bounded("top_p")] = _default("top_p")
    top_k: Annotated[int, _bounded("top_k")] = _default("top_k")
    seed: Annotated[int, _bounded("seed")] | None = None
    stop: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP)], ...], msgspec.Meta(max_length=MAX_STOPS)
    ] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_STOPS)] = ()
    min_tokens: Annotated[int, _bounded("min_tokens")] = _default("min_tokens")
    min_p: Annotated[float, _bounded("min_p")] = _default("min_p")
    presence_penalty: Annotated[float, _bounded("presence_penalty")] = _default("presence_penalty")
    frequency_penalty: Annotated[float, _bounded("frequency_penalty")] = _default("frequency_penalty")
    repetition_penalty: Annotated[float, _bounded("repetition_penalty")] = _default("repetition_penalty")
    structured_outputs: StructuredOutputs | None = None

    def within(self, room: int) -> dict[str, Any]:
        """All settings by name, as an engine takes them, for a response of at most `room` tokens.

        Near the end of the window there may be room for fewer than `min_tokens`.
        """
        settings = {name: getattr(self, name) for name in self.__struct_fields__}
        return settings | {
            "max_tokens": room,
            "min_tokens": min(self.min_tokens, room),
            "top_k": self.top_k if self.top_k > 0 else -1,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to continue.

    Attributes:
        request_id: Unique per attempt at a turn.
        session_id: The same for all turns of a trajectory, so that they can go to the replica with their prefix cached.
        token_ids: The whole prompt, `array("i")`. It grows with the trajectory: copy it to keep it.
        tools: Tools that the response may call, if the engine is to parse its calls.
    """

    request_id: str
    session_id: str
    token_ids: array[int]
    sampling: SamplingParameters
    tools: Sequence[Tool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One continuation.

    Attributes:
        token_ids: Sampled ids, with those of a stop string or end-of-sequence token, `array("i")`.
        logprobs: Log-probability of each id under the distribution it was sampled from, `array("f")`; empty only
            from policies of another interface that return none.
        finish_reason: `stop` (stop string or token), `length` (max_tokens or the engine's window) or `abort`.
        cached_tokens: Prompt tokens whose key-value cache was reused.
        policy_versions: Spans `(version, start, end)` over `token_ids`, end exclusive.
        exact: `token_ids` are the sampled ones; False: the server returned only text, and they are its encoding,
            which may have other tokens, and more than the requested maximum.
        tool_calls: Calls of the request's tools; None: they were not parsed.
    """

    token_ids: array[int]
    logprobs: array[float]
    finish_reason: FinishReason
    cached_tokens: int = 0
    policy_versions: tuple[tuple[str, int, int], ...] = field(default=())
    exact: bool = True
    tool_calls: ToolCalls | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Model, limits and load of a policy endpoint.

    Attributes:
        engine: Its name and version.
        max_model_len: The engine's window, tokens.
        policy_version: Of the weights that it answers with now.
        ongoing_requests: Requests that it works on now.
        max_ongoing_requests: How many one replica takes at once; 0: unknown.
        kv_cache_tokens: Capacity of one replica's key-value cache in tokens; 0: unknown.
        tokens_in_flight: Tokens generated so far for requests that it has not answered yet.
        commit: The model's commit at the hub; None: it is not of the hub, or unknown.
    """

    model: str
    engine: str
    max_model_len: int
    vocab_size: int
    policy_version: str
    ongoing_requests: int = 0
    max_ongoing_requests: int = 0
    kv_cache_tokens: int = 0
    tokens_in_flight: int = 0
    commit: str | None = None


_CREDENTIALS_REFUSED = (401, 403)


class PolicyError(Exception):
    """A generation request failed.

    Attributes:
        reason: Why (`data.causes`).
        evidence: What shows it.
    """

    reason: ClassVar[ReasonName] = "PolicyFailed"

    def __init__(self, message: str = "", *, evidence: Evidence = NO_EVIDENCE) -> None:
        super().__init__(message)
        self.evidence = evidence

    @property
    def cause(self) -> Cause:
        """Why it failed, and what shows it."""
        return Cause(self.reason, self.evidence)


class PolicyUnavailable(PolicyError):
    """The endpoint is at fault (down, overloaded, broken): a retry may succeed."""


class InvalidAnswer(PolicyUnavailable):
    """The endpoint answered, and not what was asked for."""

    reason = "InvalidAnswer"


class Silent(PolicyUnavailable):
    """The endpoint did not answer in time; what became of the request is unknown."""

    reason = "PolicySilent"


class PolicyRefused(PolicyError):
    """The request is at fault: a retry would be refused, too."""

    reason = "RequestRefused"

    @property
    def cause(self) -> Cause:
        """See `PolicyError.cause`."""
        refused = self.evidence.http_status in _CREDENTIALS_REFUSED
        return Cause("AccessRefused" if refused else self.reason, self.evidence)


class UnknownTokens(PolicyError):
    """The model has sampled ids that are no tokens: a retry with the same seed would, too."""

    reason = "UnknownTokens"


class FatalRequest(PolicyRefused):
    """The request kills engines, so it is not sent to another one."""


class Policy(Protocol):
    """Anything that generates."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one sequence; cancelling the call aborts the generation.

        Raises:
            PolicyUnavailable: The endpoint did not respond properly.
            PolicyRefused: The request is invalid.
        """
        ...
