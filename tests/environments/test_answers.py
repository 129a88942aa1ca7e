"""An answer belongs to the call that asked for it: nobody else's is taken, whatever an environment does."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.rollouts.scheduling import run_rollout
from tests.environments.hostile import ACTS, TURNS, observed, reward
from tests.rollouts.fakes import rollout_of, sample

pytestmark = pytest.mark.slow

ENVIRONMENTS = int(os.environ.get("KUBEROLL_TEST_HOSTILE_ENVIRONMENTS", "12"))
SPEC = PlainSpec(name="env", type=None, entrypoint="tests.environments.hostile:Hostile", config={})


async def play(rows: list[dict[str, Any]], *, processes: int, seed: int, isolation: str = "Process") -> dict[int, Any]:
    """Results by row."""
    spec = PlainSpec(name="env", type=None, entrypoint=SPEC.entrypoint, config={"seed": seed})
    runner = EnvironmentRunner(
        make_executor(spec, isolation=isolation, processes=processes, timeout=10, spare=seed % 3), max_batch=64
    )
    results: dict[int, Any] = {}

    async def sink(result: Any) -> None:
        assert result.task_index not in results
        results[result.task_index] = result

    try:
        await run_rollout(
            rollout_of({"env": runner}, concurrency=len(rows)),
            [sample(row["row"], metadata=row) for row in rows],
            sink,
        )
    finally:
        await runner.close()
    return results


def check(rows: list[dict[str, Any]], results: dict[int, Any]) -> None:
    """Good rows have their own outcomes; bad ones theirs, or they failed."""
    assert results.keys() == {row["row"] for row in rows}
    for row in rows:
        number, result = row["row"], results[row["row"]]
        if hasattr(result, "cause"):
            assert "act" in row, (row, result.cause)
            # A process that kills itself looks like one that was killed.
            assert result.kind == "environment" or result.reason == "ProcessKilled"
            continue
        turns = range(TURNS)
        assert [message.content for message in result.messages if message.role == "environment"] == [
            observed(number, turn) for turn in turns
        ], row
        assert result.total_reward == sum(reward(number, turn) for turn in turns), row
        assert result.metadata == {**row, "turn": TURNS}


@pytest.mark.long
@pytest.mark.parametrize("act", ACTS)
async def test_one_bad_row_of_a_batch_harms_no_other(act: str) -> None:
    rows: list[dict[str, Any]] = [{"row": number} for number in range(8)]
    rows[3] |= {"act": act, "when": 1}
    check(rows, await play(rows, processes=1, seed=1))


@pytest.mark.parametrize("number", range(ENVIRONMENTS))
async def test_random_environments_that_fork_write_and_die(number: int) -> None:
    chance = random.Random(number)
    rows: list[dict[str, Any]] = [{"row": row} for row in range(chance.randrange(2, 17))]
    for row in chance.sample(rows, min(len(rows) - 1, chance.choice([1, 1, 2, 3]))):
        row |= {"act": chance.choice(list(ACTS)), "when": chance.randrange(TURNS)}
    check(rows, await play(rows, processes=chance.choice([1, 1, 2]), seed=number))
