"""Sessions of agents as a worker sees them: their settings, their addresses, and what was sampled in them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Final, Protocol, runtime_checkable

import msgspec

from kuberoll_api.model.types import MAX_SEED
from kuberoll_workers.policy.interface import SamplingParameters

MAX_IDLE_SECONDS: Final = 86_400.0

_Count = Annotated[int, msgspec.Meta(ge=1)]


class SessionSettings(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings of a session.

    Attributes:
        idle_seconds: Time without a call after which it is closed; None: the replica's default.
        sampling: For calls that do not set these themselves; None: the API's defaults.
        seed: Seed of all its calls: those that set none get one of their own from it.
        max_calls: Number of responses after which calls are refused; None: the replica's own limit.
        max_sequence_length: Maximum number of tokens of a prompt with its response; None: the engine's window.
    """

    idle_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_IDLE_SECONDS)] | None = None
    sampling: SamplingParameters | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] | None = None
    max_calls: _Count | None = None
    max_sequence_length: _Count | None = None


class AgentSession(msgspec.Struct, kw_only=True, frozen=True):
    """An open session.

    Attributes:
        url: Where it is closed.
        token: Opens it, and nothing else.
    """

    id: str
    url: str
    openai_base_url: str
    anthropic_base_url: str
    token: str
    model: str


class SessionMessage(msgspec.Struct, kw_only=True, frozen=True):
    """One part of a path.

    Attributes:
        role: `assistant` was sampled; `context` was only read.
        learn: False for what was only read, and for a response that an earlier path has, too.
        tool_calls: Calls of tools; with an id where the agent went on from them.
        text: What the response says beside its calls; None: it calls nothing.
        sampling: The distribution that it was sampled from (`data.sampling`); None: it was read, or it is unknown.
        chat: The chat messages that a context was made of; None: unknown.
    """

    role: str
    content: str
    token_ids: list[int]
    logprobs: list[float] | None = None
    policy_versions: list[tuple[str, int, int]] = []
    learn: bool = False
    tool_calls: list[dict[str, Any]] | None = None
    text: str | None = None
    finish_reason: str | None = None
    sampling: dict[str, Any] | None = None
    chat: list[dict[str, Any]] | None = None


class SessionTiming(msgspec.Struct, kw_only=True, frozen=True):
    """Times of the calls of a path, in seconds; `ended_at` are Unix times."""

    generation_seconds: list[float]
    ended_at: list[float]


class SessionPath(msgspec.Struct, kw_only=True, frozen=True):
    """A path from a root of a session's calls to a leaf.

    Attributes:
        tools: Functions that its first request declared; None: none.
    """

    messages: list[SessionMessage]
    timing: SessionTiming
    continuity: dict[str, int] = {}
    tools: list[dict[str, Any]] | None = None


class ClosedSession(msgspec.Struct, kw_only=True, frozen=True):
    """What was sampled in a session.

    Attributes:
        opened_at: Unix time, seconds.
        refused: Number of calls that were refused for `max_calls` or `max_sequence_length`.
        aborted: Number of requests whose responses the engine did not finish, and that the agent did not repeat with
            more success.
        continuity: Number of calls by how they continued others.
        trajectories: In the order of their leaves.
    """

    opened_at: float
    calls: int
    refused: int = 0
    aborted: int = 0
    continuity: dict[str, int] = {}
    trajectories: list[SessionPath]


@runtime_checkable
class AgentPolicy(Protocol):
    """A policy that agents can call by themselves."""

    async def open_session(self, session_id: str, settings: SessionSettings) -> AgentSession:
        """Open a session for an agent, at the best replica; wait while no replica has a place for it.

        Args:
            session_id: Of the trajectory, as in `GenerationRequest`.

        Raises:
            PolicyUnavailable: It failed several times although the replicas are healthy.
            PolicyRefused: The policy has no sessions.
        """
        ...

    def attend_session(self, session: AgentSession) -> AbstractAsyncContextManager[None]:
        """Cancel what is inside the context when the session's replica is lost; the session is closed then.

        Raises:
            PolicyUnavailable: It is lost, and what was sampled in the session with it.
        """
        ...

    async def close_session(self, session: AgentSession) -> ClosedSession:
        """Close a session; returns what was sampled in it.

        Raises:
            PolicyUnavailable: The replica is gone, and with it what was sampled.
        """
        ...
