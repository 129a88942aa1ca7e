"""What the Serve app asks of an engine."""

from __future__ import annotations

from typing import Protocol

from kuberoll_workers.policy.interface import EngineInfo, GenerationRequest, GenerationResult

OWN_VERSION = "0"
"""The version of the weights that a model comes with."""


class WeightsRefused(Exception):
    """Weights cannot be used, and none of them were: the engine goes on with those it has."""


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

    async def load_weights(self, uri: str | None, version: str) -> None:
        """Go on with other weights; never called twice at once.

        Sequences under way stop between two tokens, and go on with the new weights and nothing kept of the old ones
        but their tokens.

        Args:
            uri: A directory of this machine, or a URI; None: the model's own.
            version: What the tokens made with them are marked with.

        Raises:
            WeightsRefused: They cannot be used; the old ones are.
            PolicyUnavailable: The engine is broken: some may be the new ones, and it generates no more.
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
