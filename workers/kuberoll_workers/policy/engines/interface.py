"""What the Serve app asks of an engine."""

from __future__ import annotations

from typing import Protocol

from kuberoll_workers.policy.interface import EngineInfo, GenerationRequest, GenerationResult


class Engine(Protocol):
    """Generates, many sequences at once."""

    async def start(self) -> None:
        """Load the model and get ready, so that the first generation takes no longer than the later ones.

        Raises:
            Exception: The engine's own, when it cannot.
        """
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one sequence; cancelling the call aborts it.

        Raises:
            PolicyUnavailable: The engine is at fault.
            PolicyRefused: The request is.
        """
        ...

    async def check_health(self) -> None:
        """Return only when the engine can generate.

        Raises:
            PolicyUnavailable: It cannot; says why.
        """
        ...

    def info(self) -> EngineInfo:
        """What it serves; after `start`."""
        ...

    async def shutdown(self) -> None:
        """Stop what was started."""
        ...
