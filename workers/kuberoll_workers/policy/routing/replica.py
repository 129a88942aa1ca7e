"""What routing asks of a replica, and what it offers to the loop."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from kuberoll_workers.policy.interface import EngineInfo, GenerationRequest, GenerationResult


class Address(NamedTuple):
    """A replica's name, which no other replica has had before it, and its base URL."""

    id: str
    url: str


@runtime_checkable
class SessionPolicy(Protocol):
    """A policy that keeps something for each trajectory, and lets go of it when it is told."""

    def end_session(self, session_id: str) -> None:
        """The trajectory has ended, however it did; there is no further request of it."""
        ...


class ReplicaClient(Protocol):
    """One replica's client."""

    @property
    def load(self) -> int | None:
        """Requests that it was working on besides the newest answered one; None where it does not say."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one sequence.

        Raises:
            Overloaded, Unreachable: See `client`.
            PolicyUnavailable: The replica is at fault.
            PolicyRefused: The request is.
        """
        ...

    async def healthy(self) -> bool:
        """Whether it can generate now."""
        ...

    async def info(self) -> EngineInfo:
        """What it serves.

        Raises:
            PolicyUnavailable: It does not say.
        """
        ...
