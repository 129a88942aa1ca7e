"""What the loop asks of a policy: token ids in, token ids and their log-probabilities out."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length", "abort"]


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

# Beyond these an engine's own arithmetic fails, and with it all requests in its batch.
MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 1e6


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one response is sampled; as it travels, too, where the bounds are checked.

    Stop strings belong to this request alone and are included in the output. `temperature` 0 is greedy.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=0)]
    temperature: Annotated[float, msgspec.Meta(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] = -1
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] | None = None
    stop: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to continue.

    Attributes:
        request_id: Unique per attempt at a turn.
        session_id: The same for all turns of a trajectory, so that they can stay where their prefix is cached.
        token_ids: The whole prompt, `array("i")`. It grows with the trajectory: to keep it, copy it.
    """

    request_id: str
    session_id: str
    token_ids: array[int]
    sampling: SamplingParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One continuation.

    Attributes:
        token_ids: Sampled ids, the ones of a stop string or end-of-sequence token included, `array("i")`.
        logprobs: Log-probability of each of them under the distribution it was sampled from, `array("f")`;
            empty only from policies of another interface, which may give none.
        finish_reason: `stop` (stop string or token), `length` (max_tokens or the engine's window) or `abort`.
        cached_tokens: Prompt tokens whose key-value cache was reused.
        policy_versions: Spans `(version, start, end)` over `token_ids`, end exclusive.
        exact: `token_ids` are the sampled ones; False: the server told the text alone, and they are its encoding,
            which may be of other tokens, and of more than were asked for.
    """

    token_ids: array[int]
    logprobs: array[float]
    finish_reason: FinishReason
    cached_tokens: int = 0
    policy_versions: tuple[tuple[str, int, int], ...] = field(default=())
    exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a policy endpoint serves.

    Attributes:
        engine: Its name and version.
        max_model_len: The engine's window, tokens.
        policy_version: Of the weights that it answers with now.
        ongoing_requests: Requests that it works on now.
        max_ongoing_requests: How many one replica takes at once; 0: unknown.
        kv_cache_tokens: For how many tokens of context one replica has room; 0: unknown.
    """

    model: str
    engine: str
    max_model_len: int
    vocab_size: int
    policy_version: str
    ongoing_requests: int = 0
    max_ongoing_requests: int = 0
    kv_cache_tokens: int = 0


class PolicyError(Exception):
    """A generation request failed."""


class PolicyUnavailable(PolicyError):
    """The endpoint is at fault (down, overloaded, broken): worth another try."""


class PolicyRefused(PolicyError):
    """The request itself is at fault: another try would be refused too."""


class FatalRequest(PolicyRefused):
    """The request itself ends the engine: it is not sent to another one."""


class Policy(Protocol):
    """Anything that generates."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one sequence; cancelling the call aborts the generation.

        Raises:
            PolicyUnavailable: The endpoint did not answer properly.
            PolicyRefused: The request is invalid.
        """
        ...
