"""A simulated engine that notes what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult
from kuberoll_workers.serving.engines.simulated import Simulated


class CountingEngine:
    """A simulated engine that counts its requests, and announces each."""

    def __init__(self, engine: Simulated, point: Callable[[], object] = lambda: None) -> None:
        self._engine = engine
        self._point = point
        self.requests: list[str] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self._point()
        self.requests.append(request.request_id)
        return await self._engine.generate(request)


async def counting_engine(
    model: Path, responses: Sequence[str], point: Callable[[], object] = lambda: None
) -> CountingEngine:
    """A simulated engine that gives some responses at once, with the tokenizer of a model."""
    engine = Simulated(
        model="none",
        tokenizer=str(model),
        settings=SimulatedEngine.model_validate({"responses": responses, "firstTokenSeconds": 0.0}),
        engine_args={"max_model_len": 512},
    )
    await engine.start()
    return CountingEngine(engine, point)
