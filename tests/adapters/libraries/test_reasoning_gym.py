from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from kuberoll_workers.adapters.reasoning_gym import ReasoningGymEnvironment
from kuberoll_workers.environments import UnusableEnvironment, UnusableRow
from tests.adapters.libraries.support import ISOLATIONS, assert_needs_its_extra, run
from tests.environments.support import step_one

REFUSED = {"game_of_life_halting"}
TASKS = sorted(set(DATASETS) - REFUSED - {"composite"})
# Entries of these have no answer of their own: their verifiers check a plan or a proof.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
NONSENSE = "none of the above, I think"


def environment(task: str = "chain_sum", **config: Any) -> ReasoningGymEnvironment:
    return ReasoningGymEnvironment({"task": task, **config})


def stored(row: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a row after a file."""
    loaded: dict[str, Any] = json.loads(json.dumps(row["metadata"], allow_nan=False))
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_each_task_accepts_its_own_answer_and_no_nonsense(task: str) -> None:
    tasks = environment(task)
    rows = tasks.generate_dataset(2, seed=7)
    assert rows == tasks.generate_dataset(2, seed=7)
    for row in rows:
        state = stored(row)
        for answer, right in ((state["answer"], True), (NONSENSE, False), ("", False)):
            result = step_one(tasks, f"<think>so</think> <answer>{answer}</answer>", state)
            if right and task not in WITHOUT_ANSWER:
                assert result.rewards == [1.0]
            elif not right:
                assert 0.0 <= result.rewards[0] < 0.5
            assert result.terminateds == [True]
        assert 0.0 <= step_one(tasks, "I do not know.", state).rewards[0] < 0.05


def test_the_list_of_tasks_without_an_answer_is_true() -> None:
    assert all(environment(task).generate_dataset(1, 3)[0]["metadata"]["answer"] is None for task in WITHOUT_ANSWER)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<answer>{answer}</answer>", 1.0),
        ("<answer>1</answer> no: <answer> {answer} </answer>>", 1.0),
        ("<answer>{answer}</answer> no: <answer>-1</answer>", 0.0),
        ("<answer>{answer}", 0.0),
        ("{answer}", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_tag_is_the_answer(reply: str, reward: float) -> None:
    tasks = environment()
    (row,) = tasks.generate_dataset(1, seed=0)
    assert row["stop_strings"] == ["</answer>"]
    result = step_one(tasks, reply.format(answer=row["metadata"]["answer"]), row["metadata"])
    assert result.rewards == [reward]
    assert result.metadata[0]["score"] == reward
    assert result.observations[0]["content"] == ""


def test_without_a_tag_the_response_is_the_answer() -> None:
    tasks = environment(tag=None)
    (row,) = tasks.generate_dataset(1, seed=0)
    assert "stop_strings" not in row
    assert row["messages"][0]["content"] == row["metadata"]["question"]
    assert step_one(tasks, f" {row['metadata']['answer']}\n", row["metadata"]).rewards == [1.0]


def test_an_answer_that_the_verifier_cannot_read_gets_nothing() -> None:
    """reasoning-gym's verifier of this task raises ValueError for words."""
    tasks = environment("prime_factorization")
    (row,) = tasks.generate_dataset(1, seed=0)
    assert step_one(tasks, "<answer>three primes</answer>", row["metadata"]).rewards == [0.0]


def test_an_answer_that_the_machine_could_not_verify_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = environment()
    (row,) = tasks.generate_dataset(1, seed=0)
    score = tasks._verifier.score_answer
    troubles = iter([OSError(errno.ENOSPC, "no space left on device")])

    def once(answer: Any, entry: Any) -> float:
        if (trouble := next(troubles, None)) is not None:
            raise trouble
        return float(score(answer, entry))

    monkeypatch.setattr(tasks._verifier, "score_answer", once)
    reply = f"<answer>{row['metadata']['answer']}</answer>"
    with pytest.raises(OSError, match="no space left"):
        step_one(tasks, reply, row["metadata"])
    assert step_one(tasks, reply, row["metadata"]).rewards == [1.0]


def test_grids_are_compared_after_json() -> None:
    """reasoning-gym 0.1.25 scores its own answer with 0.05 after JSON has made lists of its tuples."""
    tasks = environment("rearc")
    (row,) = tasks.generate_dataset(1, seed=0)
    assert step_one(tasks, f"<answer>{row['metadata']['answer']}</answer>", stored(row)).rewards == [1.0]


def test_parameters_and_composites() -> None:
    long = environment(parameters={"min_terms": 6, "max_terms": 6}).generate_dataset(1, 0)[0]["metadata"]["question"]
    assert sum(symbol in "+-" for symbol in long.split()) >= 5
    parts = [{"name": "gcd", "weight": 2}, {"name": "lcm", "weight": 1, "config": {"min_numbers": 2}}]
    both = environment("composite", parameters={"datasets": parts})
    rows = both.generate_dataset(20, 1)
    assert {row["metadata"]["metadata"]["source_dataset"] for row in rows} == {"gcd", "lcm"}
    for row in rows:
        assert step_one(both, f"<answer>{row['metadata']['answer']}</answer>", stored(row)).rewards == [1.0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.task: "),
        ({"task": "chain_sums"}, "config.task: reasoning-gym has no dataset 'chain_sums'"),
        ({"task": "game_of_life_halting"}, "accepts every answer"),
        ({"task": "chain_sum", "parameters": {"terms": 2}}, "config.parameters: chain_sum does not accept them"),
        ({"task": "chain_sum", "parameters": {"min_terms": 9}}, "config.parameters: chain_sum does not accept them"),
        ({"task": "chain_sum", "parameters": {"seed": 1}}, "config.parameters.seed: dataset.source.generator"),
        ({"task": "composite"}, "config.parameters.datasets: "),
        ({"task": "composite", "parameters": {"datasets": [{"name": "no"}]}}, "has no dataset 'no'"),
    ],
)
def test_a_wrong_config_names_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableEnvironment) as caught:
        ReasoningGymEnvironment(config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "metadata.question: found None"),
        ({"question": "?"}, "metadata.answer: found nothing"),
        ({"question": "?", "answer": "1", "metadata": 3}, "metadata.metadata: found 3"),
        ({"question": "?", "answer": "1", "metadata": {"$integer": "x"}}, "metadata: found values that are none"),
        ({"question": "?", "answer": "two", "metadata": {}}, "cannot score"),
    ],
)
def test_rows_that_are_no_entries_are_refused(metadata: Any, message: str) -> None:
    with pytest.raises(UnusableRow) as caught:
        step_one(environment("prime_factorization"), "<answer>two</answer>", metadata)
    assert message in str(caught.value)
    if message != "cannot score":
        with pytest.raises(UnusableRow, match=re.escape(message)):
            environment("prime_factorization").check_row(metadata)


def test_a_machine_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_needs_its_extra(monkeypatch, "reasoning_gym", "reasoning_gym", "reasoning-gym", {"task": "chain_sum"})


@pytest.mark.processes
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_run(tmp_path: Path, isolation: str) -> None:
    tasks = environment("coin_flip")
    answers = sorted({row["metadata"]["answer"] for row in tasks.generate_dataset(20, 0)})
    records = run(
        tmp_path,
        {"name": "coins", "type": "reasoning_gym", "config": {"task": "coin_flip"}, "isolation": isolation},
        [*(f"<answer>{answer}</answer>" for answer in answers), "I am not sure."],
    )
    assert len(records) == 32
    for record in records:
        assert record.stop_reason == "terminated"
        assert record.metadata is not None
        right = f"<answer>{record.metadata['answer']}</answer>" in record.messages[-2].content
        assert record.total_reward == float(right) or not right
    assert {record.total_reward for record in records} >= {0.0, 1.0}
