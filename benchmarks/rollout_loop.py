"""CPU time that the rollout loop takes per turn, with an engine and an environment that take none.

256 trajectories of 8 turns and 64 generated tokens, in both schedulings, metrics and all. What is counted is the CPU
time of the whole process, environment thread included; tokenizing is left out, for it depends on the model.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.prompts import Prompt, Sample
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, SamplingParameters
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import RolloutSettings, Scheduling
from kuberoll_workers.rollouts.turns import Rollout
from kuberoll_workers.telemetry import RolloutMetrics

TOKENS = 64


class InstantPolicy:
    """The same 64 tokens, at once."""

    def __init__(self) -> None:
        self._result = GenerationResult(
            token_ids=token_array(range(TOKENS)), logprobs=array("f", [-0.5] * TOKENS), finish_reason="stop"
        )

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return self._result


class InstantEnvironment:
    """Ends after as many turns as the metadata says."""

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        return EnvironmentReturn(
            [{"role": "environment", "content": "go on"}] * len(logs),
            [{"left": state["left"] - 1} for state in metadata],
            None,
            [0.0] * len(logs),
            [state["left"] == 1 for state in metadata],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


class InstantTokenizer:
    """Sixteen tokens for any text."""

    _ids = token_array(range(16))

    def encode(self, text: str) -> array[int]:
        return self._ids

    def decode(self, ids: Sequence[int]) -> str:
        return "text"

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> array[int]:
        return self._ids


def samples(count: int, turns: int) -> list[Sample]:
    ids = token_array(range(100))
    return [
        Sample(
            prompt=Prompt(
                task_index=index,
                task_name="instant",
                idx=index,
                messages=(Message("user", "prompt", ids),),
                token_ids=ids,
                metadata={"left": turns},
                stop_strings=None,
                sampling={},
            ),
            rollout_index=0,
            seed=index,
        )
        for index in range(count)
    ]


async def microseconds_per_turn(scheduling: Scheduling, count: int, turns: int) -> float:
    ended = 0

    async def sink(result: TrajectoryRecord | FailureRecord) -> None:
        nonlocal ended
        ended += 1
        assert result.turn_count == turns

    environment = InstantEnvironment()
    executor = make_executor(lambda: environment, isolation="Inline", processes=1, timeout=60)
    runner = EnvironmentRunner(executor, max_batch=count)
    settings = RolloutSettings(
        max_turns=turns,
        max_sequence_length=1_000_000,
        concurrency=count,
        scheduling=scheduling,
        sampling=SamplingParameters(max_tokens=TOKENS + 1),
    )
    rollout = Rollout(
        policy=InstantPolicy(),
        environments={"instant": runner},
        tokenizer=InstantTokenizer(),
        settings=settings,
        metrics=RolloutMetrics("benchmark"),
    )
    given = samples(count, turns)
    began = time.process_time()
    await run_rollout(rollout, given, sink)
    seconds = time.process_time() - began
    await runner.close()
    assert ended == count
    return seconds / (count * turns) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    schedulings: tuple[Scheduling, ...] = ("Concurrent", "Lockstep")
    for scheduling in schedulings:
        rounds = [
            asyncio.run(microseconds_per_turn(scheduling, arguments.trajectories, arguments.turns))
            for _ in range(arguments.rounds)
        ]
        print(
            f"{scheduling}: {statistics.median(rounds):.1f} µs CPU per turn "
            f"(median of {len(rounds)} rounds, {min(rounds):.1f} to {max(rounds):.1f})"
        )


if __name__ == "__main__":
    main()
