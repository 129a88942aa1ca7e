"""Scenarios that are played: each kind of them in a run of its own, all of a kind at a time."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.environments.processes import ProcessExecutor
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import RetryPolicy
from tests.faults.blame.engines import Engines
from tests.faults.blame.scenario import Scenario
from tests.faults.blame.service import Places
from tests.rollouts.fakes import CountingEnvironment, rollout_of, runners, sample

PROCESSES = 3
RETRIES = RetryPolicy(backoff_seconds=0.01, max_backoff_seconds=0.02, environment_attempts=2, generation_attempts=2)
_PROGRAMS = {"cpuSeconds": 0.5, "wallSeconds": 3, "memoryMiB": 96, "parallel": PROCESSES}
SPECS = {
    "acting": ("tests.faults.blame.acting:Acting", None, {}),
    "deadline": ("tests.faults.blame.acting:Acting", None, {}),
    "bad": ("tests.environments.misbehaving:Misbehaving", None, {}),
    "program": (None, "code_execution", _PROGRAMS),
    "response": (None, "string_match", {}),
}


class Answering:
    """A policy that answers each trajectory as its scenario says, up to the limit of tokens."""

    def __init__(self, scenarios: Sequence[Scenario]) -> None:
        self._scenarios = scenarios

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        answer = self._scenarios[int(request.session_id.split("-")[0])].answer
        ids = token_array(map(ord, answer))[: request.sampling.max_tokens]
        return GenerationResult(
            token_ids=ids,
            logprobs=array("f", [-0.5] * len(ids)),
            finish_reason="stop" if len(ids) == len(answer) else "length",
        )


async def played(scenarios: Sequence[Scenario], places: Places) -> list[str]:
    """What is wrong about how they were judged, of all of them."""
    stages = dict.fromkeys(scenario.stage for scenario in scenarios)
    wrong: list[str] = []
    for stage in stages:
        wrong += await _played([one for one in scenarios if one.stage == stage], stage, places)
    return wrong


async def _played(scenarios: Sequence[Scenario], stage: str, places: Places) -> list[str]:
    results: dict[int, Any] = {}

    async def sink(result: Any) -> None:
        results[result.task_index] = result

    samples = [
        sample(
            number, prompt=one.metadata.get("prompt", "prompt"),
            metadata={"turns": 1, **one.metadata} if stage == "engine" else one.metadata,
        )
        for number, one in enumerate(scenarios)
    ]  # fmt: skip
    changes: dict[str, Any] = {"turn_seconds": 4.0} if stage == "deadline" else {}
    async with _environment(stage) as made, _policy(scenarios, stage, places) as policy, asyncio.timeout(900):
        rollout = rollout_of(
            made, policy=policy, retries=RETRIES, concurrency=24, max_sequence_length=4000, generation_seconds=2.0,
            **changes,
        )  # fmt: skip
        await run_rollout(rollout, samples, sink)
    found = [one.wrong(results[number]) for number, one in enumerate(scenarios)]
    return [words for words in found if words is not None]


@asynccontextmanager
async def _policy(scenarios: Sequence[Scenario], stage: str, places: Places) -> AsyncIterator[Any]:
    if stage != "engine":
        yield Answering(scenarios)
        return
    async with Engines(lambda number: scenarios[number].engine, places.nobody).serving() as engines:
        yield engines


@asynccontextmanager
async def _environment(stage: str) -> AsyncIterator[dict[str, EnvironmentRunner]]:
    if stage == "engine":
        async with runners({"env": CountingEnvironment()}) as made:
            yield made
        return
    entrypoint, kind, config = SPECS[stage]
    spec = PlainSpec(name="env", type=kind, entrypoint=entrypoint, config=dict(config))
    executor = ProcessExecutor(spec, processes=1 if stage == "program" else PROCESSES, timeout=60.0)
    # One at a time: a step of several is repeated one by one where it fails, which the runner's own tests show.
    runner = EnvironmentRunner(executor, max_batch=64 if stage == "program" else 1)
    try:
        yield {"env": runner}
    finally:
        await runner.close()
