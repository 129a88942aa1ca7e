"""Processes that are killed in the middle of an episode: it ends as if they were not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest

from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import RetryPolicy
from kuberoll_workers.telemetry import RolloutMetrics
from tests.adapters.libraries.test_contract import ARITHMETIC, LAKE
from tests.rollouts.fakes import ScriptedPolicy, rollout_of, sample

pytestmark = pytest.mark.processes

TRAJECTORIES = 64
EXTRAS: dict[str, Any] = ARITHMETIC["metadata"]
WAYS = ("left", "down", "right", "up")


def turn_of(request: Any) -> tuple[int, int]:
    """Number of the row and of the turn, from 1."""
    task, _, _, turn, _ = request.request_id.split("-")
    return int(task), int(turn)


def walk(request: Any) -> str:
    row, turn = turn_of(request)
    return f"<action>{WAYS[(row * 7 + turn * turn) % 4]}</action>"


def guess(request: Any) -> str:
    row, turn = turn_of(request)
    return f"[{1 + (row * 7 + turn * 3) % 20}]"


def answer(request: Any) -> str:
    row, turn = turn_of(request)
    return f"#### {7 if row % 2 and turn == 3 else turn}"


SUBJECTS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Any], str]]] = {
    "gymnasium": ({**LAKE, "parameters": {"is_slippery": True}}, {}, walk),
    "textarena": ({"game": "GuessTheNumber-v0"}, {}, guess),
    "skyrl_gym": ({"id": "gsm8k_multi_turn"}, EXTRAS, answer),
}
RECOVERIES = {"gymnasium": "replay", "textarena": "replay", "skyrl_gym": "restart"}


async def play(name: str, kills: set[tuple[int, int]]) -> tuple[dict[Any, TrajectoryRecord], dict[str, float]]:
    """Trajectories by key, and recoveries by kind; all processes are killed before the turns in `kills`, once each."""
    config, metadata, reply = SUBJECTS[name]
    spec = PlainSpec(name="env", type=name, entrypoint=None, config=config)
    runner = EnvironmentRunner(
        make_executor(spec, isolation="Process", processes=2, timeout=120), max_batch=TRAJECTORIES
    )
    before = set(psutil.Process().children(recursive=True))
    left = set(kills)

    def answer_after_kill(request: Any) -> str:
        if turn_of(request) in left:
            left.discard(turn_of(request))
            for child in set(psutil.Process().children(recursive=True)) - before:
                os.kill(child.pid, signal.SIGKILL)
        return reply(request)

    results: dict[Any, Any] = {}

    async def sink(result: Any) -> None:
        results[result.key] = result

    metrics = RolloutMetrics("test")
    samples = [sample(number, metadata=metadata) for number in range(TRAJECTORIES)]
    samples = [replace(made, prompt=replace(made.prompt, seed=100 + made.prompt.task_index)) for made in samples]
    try:
        rollout = rollout_of(
            {"env": runner},
            policy=ScriptedPolicy(answer_after_kill),
            metrics=metrics,
            concurrency=16,
            max_sequence_length=100_000,
            # On a busy machine a kill finds processes that still start after the one before.
            retries=RetryPolicy(environment_attempts=len(kills) + 1),
        )
        await run_rollout(rollout, samples, sink)
    finally:
        await runner.close()
    assert not left
    found = [item for family in metrics.registry.collect() for item in family.samples if "recover" in item.name]
    return results, {item.labels.get("recovery", ""): item.value for item in found if item.name.endswith("_total")}


@pytest.mark.parametrize("name", sorted(SUBJECTS))
async def test_killed_processes_change_no_trajectory(name: str) -> None:
    expected, none = await play(name, set())
    assert not any(none.values())
    results, recoveries = await play(name, {(3, 2), (20, 3), (41, 2)})
    assert recoveries[RECOVERIES[name]] > 0
    assert results.keys() == expected.keys()
    assert len(results) == TRAJECTORIES
    for key, record in results.items():
        assert isinstance(record, TrajectoryRecord), record
        before = expected[key]
        assert [message.content for message in record.messages] == [message.content for message in before.messages]
        assert (record.rewards, record.stop_reason) == (before.rewards, before.stop_reason)
        assert record.metadata == before.metadata
    assert len({record.turn_count for record in results.values()}) > 1
    assert len({record.total_reward for record in results.values()}) > 1
