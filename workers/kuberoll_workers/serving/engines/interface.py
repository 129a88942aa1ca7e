"""The interface of an engine behind the Serve app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kuberoll_workers.data.sampling import Distribution
from kuberoll_workers.policy.interface import EngineInfo, GenerationRequest, GenerationResult
from kuberoll_workers.serving.engines.spot_check import Response

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

OWN_VERSION = "0"
"""The version of the weights that a model comes with."""


class WeightsRefused(Exception):
    """Weights cannot be used, and none were loaded: the engine keeps its present ones."""


@runtime_checkable
class Engine(Protocol):
    """An inference engine that generates many sequences concurrently."""

    async def start(self) -> None:
        """Load the model and warm up, so that the first generation takes no longer than later ones.

        Raises:
            Exception: The engine's own, if it cannot start.
        """
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one sequence; cancelling the call aborts it.

        Raises:
            PolicyUnavailable: The engine is at fault.
            PolicyRefused: The request is at fault.
        """
        ...

    async def load_weights(self, uri: str | None, version: str) -> None:
        """Switch to other weights; never called concurrently.

        Sequences in flight pause between two tokens and continue with the new weights; only their tokens are kept.

        Args:
            uri: A directory of this machine, or a URI; None: the model's own weights.
            version: Version that the tokens generated with them are marked with.

        Raises:
            WeightsRefused: They cannot be used; the engine keeps the old ones.
            PolicyUnavailable: The engine is broken: some weights may be new, and it no longer generates.
        """
        ...

    async def check_health(self) -> None:
        """Return only when the engine can generate.

        Raises:
            PolicyUnavailable: It cannot; the message has the reason.
        """
        ...

    def info(self) -> EngineInfo:
        """Describe model, limits and load; call it after `start`."""
        ...

    async def open_client(self) -> AsyncLLM:
        """Open vLLM's own client of the engine, around which its API server's parts are mounted; call it after `start`.

        Raises:
            ImportError: vLLM is not installed.
            PolicyUnavailable: The engine has stopped.
        """
        ...

    def check_usable(self) -> None:
        """Return only if the client's requests would be answered.

        Raises:
            PolicyUnavailable: The engine is broken: its client would wait for ever.
        """
        ...

    def note(self, response: Response, distribution: Distribution, *, computed: int) -> None:
        """Note a response that its client sampled, which an engine may check.

        Args:
            distribution: That it was sampled from.
            computed: Number of tokens that the engine computed for it.
        """
        ...

    async def shutdown(self) -> None:
        """Stop the engine and its processes."""
        ...
