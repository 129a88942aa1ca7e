"""Interfaces of routing: a replica's client, and the sessions that it keeps for the loop."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from kuberoll_workers.policy.agent_sessions import AgentSession, SessionSettings
from kuberoll_workers.policy.interface import EngineInfo, GenerationRequest, GenerationResult


class Address(NamedTuple):
    """A replica's id, which is never reused, and its base URL."""

    id: str
    url: str


@runtime_checkable
class SessionPolicy(Protocol):
    """A policy that keeps state for each trajectory until its session ends."""

    def end_session(self, session_id: str) -> None:
        """Release the state of a trajectory, which sends no more requests."""
        ...


class ReplicaClient(Protocol):
    """The client of one replica."""

    @property
    def load(self) -> int | None:
        """Number of other requests at the replica when it sent its newest response; None if unknown."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one sequence.

        Raises:
            Overloaded, Unreachable: As in `policy.client`.
            PolicyUnavailable: The replica is at fault.
            PolicyRefused: The request is at fault.
        """
        ...

    async def open_session(self, settings: SessionSettings) -> AgentSession:
        """Open a session for an agent.

        Raises:
            SessionsFull: It has as many as it takes.
            Overloaded, Unreachable, PolicyUnavailable: As `generate` does.
            PolicyRefused: It has no sessions.
        """
        ...

    async def check_health(self) -> None:
        """Check that it can generate now.

        Raises:
            PolicyUnavailable, PolicyRefused: It cannot; the message has the reason.
        """
        ...

    async def info(self) -> EngineInfo:
        """Get its model and limits.

        Raises:
            PolicyUnavailable: It does not respond properly.
        """
        ...
