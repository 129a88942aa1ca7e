"""What the benchmarks of the loop share: an engine and environments that do nothing but take time, and samples."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.prompts import Prompt, Sample
from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, SamplingParameters
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.settings import RolloutSettings
from kuberoll_workers.rollouts.turn_player import TurnSink
from kuberoll_workers.telemetry import RolloutMetrics

TASK = "instant"


class InstantPolicy:
    """The same tokens, at once."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._logprobs = token_array(range(tokens)), array("f", [-0.5] * tokens)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        # Arrays of its own for every response, as a real engine's.
        return GenerationResult(token_ids=self._tokens[:], logprobs=self._logprobs[:], finish_reason="stop")


class SlowPolicy(InstantPolicy):
    """The same tokens, after as long as `seconds(trajectory, turn)` says."""

    def __init__(self, tokens: int, seconds: Callable[[int, int], float]) -> None:
        super().__init__(tokens)
        self._seconds = seconds

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        trajectory, _, _, turn, _ = map(int, request.request_id.split("-"))
        await asyncio.sleep(self._seconds(trajectory, turn))
        return await super().generate(request)


def _returned(metadata: list[Any]) -> EnvironmentReturn:
    return EnvironmentReturn(
        [{"role": "environment", "content": "go on"}] * len(metadata),
        [{**state, "left": state["left"] - 1} for state in metadata],
        None,
        [0.0] * len(metadata),
        [state["left"] == 1 for state in metadata],
    )


class InstantEnvironment:
    """Ends after as many turns as the metadata says."""

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        return _returned(metadata)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


class ConfiguredEnvironment(InstantEnvironment):
    """The same, as a job makes it."""

    def __init__(self, config: dict[str, Any]) -> None:
        del config


class SlowEnvironment(InstantEnvironment):
    """The same, each step after as long as `seconds(trajectory, turns left)` says."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self._seconds = seconds

    async def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:  # type: ignore[override]
        await asyncio.sleep(max(self._seconds(state["number"], state["left"]) for state in metadata))
        return _returned(metadata)


class InstantTokenizer:
    """Sixteen tokens for any text."""

    _ids = token_array(range(16))
    vocabulary = 1 << 17

    def encode(self, text: str) -> array[int]:
        return self._ids[:]

    def decode(self, ids: Sequence[int]) -> str:
        return "text"

    def decode_with_special_tokens(self, ids: Sequence[int]) -> str:
        return "text"

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> array[int]:
        return self._ids[:]


def samples(count: int, turns: int, *, prompt: int = 100) -> list[Sample]:
    """Trajectories of so many turns; each with a prompt of its own."""
    return [
        Sample(
            prompt=Prompt(
                task_index=index,
                task_name=TASK,
                idx=index,
                messages=(Message("user", "prompt", ids := token_array(range(prompt))),),
                token_ids=ids,
                metadata={"left": turns, "number": index},
                stop_strings=None,
                sampling={},
            ),
            rollout_index=0,
            seed=index,
        )
        for index in range(count)
    ]


@asynccontextmanager
async def rollout_of(
    policy: Any,
    environment: Any,
    *,
    turn_sink: TurnSink | None = None,
    metrics: RolloutMetrics | None = None,
    **settings: Any,
) -> AsyncIterator[Rollout]:
    """A rollout with metrics and all, as in a worker."""
    runner = EnvironmentRunner(
        make_executor(lambda: environment, isolation="Inline", processes=1, timeout=600), max_batch=256
    )
    values: dict[str, Any] = {"max_sequence_length": 10_000_000, **settings}
    try:
        yield Rollout(
            policy=policy,
            environments={TASK: runner},
            tokenizer=InstantTokenizer(),
            settings=RolloutSettings(sampling=SamplingParameters(max_tokens=100_000), **values),
            metrics=metrics or RolloutMetrics("benchmark"),
            turn_sink=turn_sink,
        )
    finally:
        await runner.close()


def lognormal(seed: str, *, median: float, sigma: float) -> Callable[[int, int], float]:
    """Seconds by trajectory and turn: the same ones however often they are asked for."""

    def seconds(trajectory: int, turn: int) -> float:
        return median * random.Random(f"{seed} {trajectory} {turn}").lognormvariate(0.0, sigma)

    return seconds
