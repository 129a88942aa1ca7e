"""A policy, a tokenizer and environments whose behavior a test can state in a line."""

from __future__ import annotations

import asyncio
import functools
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import FunctionType
from typing import Any

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.prompts import Prompt, Sample
from kuberoll_workers.data.record import Partial
from kuberoll_workers.data.sampling import distribution_of
from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, SamplingParameters
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import RetryPolicy, RolloutSettings
from kuberoll_workers.telemetry import RolloutMetrics


def _same(environment: Any) -> Any:
    return environment


class CharacterTokenizer:
    """One token per character: counts are lengths of texts."""

    vocabulary = sys.maxunicode + 1

    def encode(self, text: str) -> array[int]:
        return token_array(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    decode_with_special_tokens = decode

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> array[int]:
        names = [tool["function"]["name"] for tool in tools or ()]
        head = f"tools:{','.join(names)}\n" if names else ""
        return self.encode(head + "".join(f"{message['role']}:{message['content']}\n" for message in messages))


class ScriptedPolicy:
    """Answers with `answer(request)`: a text, or an exception to raise."""

    def __init__(self, answer: Callable[[GenerationRequest], str | Exception] = lambda request: "x") -> None:
        self._answer = answer
        self.requests: list[GenerationRequest] = []
        self.prompts: list[list[int]] = []
        self.in_flight = 0
        self.most_in_flight = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        self.prompts.append(list(request.token_ids))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
            answer = self._answer(request)
        finally:
            self.in_flight -= 1
        if isinstance(answer, Exception):
            raise answer
        ids = token_array(map(ord, answer))[: request.sampling.max_tokens]
        cut = len(ids) < len(answer) or len(ids) == request.sampling.max_tokens
        return GenerationResult(
            token_ids=ids, logprobs=array("f", [-0.5] * len(ids)), finish_reason="length" if cut else "stop"
        )


class CountingEnvironment:
    """Ends after `metadata["turns"]` steps; each is worth 1 and observed as `observation`."""

    def __init__(self, observation: str = "obs", stops: list[str] | None = None) -> None:
        self.observation = observation
        self.stops = stops
        self.batches: list[int] = []

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        self.batches.append(len(logs))
        left = [state["turns"] - 1 for state in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": self.observation} for _ in logs],
            metadata=[{**state, "turns": turns} for state, turns in zip(metadata, left, strict=True)],
            next_stop_strings=[self.stops for _ in logs],
            rewards=[1.0 for _ in logs],
            terminateds=[turns <= 0 for turns in left],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {"seen": len(batch["total_reward"])}


def sample(
    task_index: int = 0,
    rollout_index: int = 0,
    *,
    prompt: str = "prompt",
    task_name: str = "env",
    metadata: dict[str, Any] | None = None,
    stop_strings: tuple[str, ...] | None = None,
    sampling: Mapping[str, Any] | None = None,
    seed: int | None = 7,
    partial: Partial | None = None,
) -> Sample:
    ids = token_array(map(ord, prompt))
    return Sample(
        prompt=Prompt(
            task_index=task_index,
            task_name=task_name,
            idx=f"row-{task_index}",
            messages=(Message(role="user", content=prompt, token_ids=ids),),
            token_ids=ids,
            metadata={"turns": 2} if metadata is None else metadata,
            stop_strings=stop_strings,
            sampling=sampling or {},
        ),
        rollout_index=rollout_index,
        seed=seed,
        partial=partial,
    )


def settings(**changes: Any) -> RolloutSettings:
    values: dict[str, Any] = {
        "max_turns": 8,
        "max_sequence_length": 1000,
        "concurrency": 4,
        "sampling": SamplingParameters(max_tokens=50),
        "retries": RetryPolicy(backoff_seconds=0.0),
    }
    values |= changes
    return RolloutSettings(**{"usual": distribution_of(values["sampling"]), **values})


@asynccontextmanager
async def runners(environments: Mapping[str, Any], *, step_seconds: float = 30.0, isolation: str = "Inline") -> Any:
    """Runners of environments, or of functions that make their instances."""
    made = {
        name: EnvironmentRunner(
            make_executor(
                environment
                if isinstance(environment, PlainSpec | FunctionType)
                else functools.partial(_same, environment),
                isolation=isolation,
                processes=1,
                timeout=step_seconds,
            ),
            max_batch=64,
        )
        for name, environment in environments.items()
    }
    try:
        yield made
    finally:
        for runner in made.values():
            await runner.close()


def rollout_of(made: Mapping[str, EnvironmentRunner], *, policy: Any = None, **changes: Any) -> Rollout:
    """A rollout of fakes; `changes` are settings, or `metrics`, `observations`, `players`, `turn_sink`."""
    parts = {name: changes.pop(name) for name in ("metrics", "observations", "players", "turn_sink") if name in changes}
    return Rollout(
        policy=policy or ScriptedPolicy(),
        environments=made,
        tokenizer=CharacterTokenizer(),
        settings=settings(**changes),
        **{"metrics": RolloutMetrics("test"), **parts},
    )


async def roll(
    samples: Sequence[Sample],
    *,
    policy: Any = None,
    environments: Mapping[str, Any] | None = None,
    step_seconds: float = 30.0,
    **changes: Any,
) -> list[Any]:
    """Run samples to their end; the results, in the order of the samples."""
    results: dict[Any, Any] = {}

    async def sink(result: Any) -> None:
        assert result.key not in results
        results[result.key] = result

    async with runners(environments or {"env": CountingEnvironment()}, step_seconds=step_seconds) as made:
        rollout = rollout_of(made, policy=policy, **changes)
        await run_rollout(rollout, samples, sink)
    return [results[item.key] for item in samples]


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until something has happened; the test's own time limit ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)
