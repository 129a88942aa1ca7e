from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.math_answers import MathAnswersEnvironment, is_explosive
from kuberoll_workers.environments.registry import PlainSpec
from tests.environments.support import log_of, step_all, step_one

MATH = MathAnswersEnvironment({})


@pytest.mark.parametrize(
    ("truth", "reply", "answer"),
    [
        ("16", "So the answer is \\boxed{16}.", "16"),
        ("16", "16", "16"),
        (16, "\\boxed{16.0}", "16.0"),
        ("-3", "x = -3", "-3"),
        ("1/2", "It is 0.5", "0.5"),
        ("\\frac{3}{4}", "\\boxed{\\frac{6}{8}}", "\\frac{6}{8}"),
        ("x+1", "$1 + x$", "1 + x"),
    ],
)
def test_a_right_answer_is_rewarded(truth: Any, reply: str, answer: str) -> None:
    result = step_one(MATH, reply, {"ground_truth": truth})
    assert list(result.rewards) == [1.0]
    assert list(result.terminateds) == [True]
    assert result.answers == [answer]
    assert result.observations[0]["content"] == "\nCorrect.\n"
    assert result.metadata[0] == {"ground_truth": truth, "correct": True}
    assert result.next_stop_strings == [None]


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I do not know",
        "\\boxed{17}",
        "(" * 5000,
        "\\frac{" * 900,
        "$" * 3000,
        "$\\sqrt{" * 300,
        "1/" * 2000,
        "1e999999999",
    ],
)
def test_anything_else_gets_nothing(reply: str) -> None:
    result = step_one(MATH, reply, {"expected_answer": "16"})
    assert list(result.rewards) == [0.0]
    assert list(result.terminateds) == [True]
    assert result.observations[0]["content"] == "\nWrong.\n"


def test_only_the_end_of_a_response_is_read() -> None:
    short = MathAnswersEnvironment({"maxCharacters": 20})
    assert list(step_one(short, "\\boxed{16}" + " and so on" * 10, {"ground_truth": "16"}).rewards) == [0.0]
    assert list(step_one(short, "word " * 10_000 + "\\boxed{16}", {"ground_truth": "16"}).rewards) == [1.0]


@pytest.mark.parametrize(
    "text",
    ["$9^{9^{9^{9}}}$", "$9^9^9$", "9**99999", "9 ** (99999)", "100000!", "(9!)!", "$9^{2\\cdot 9^9}$", "9^{9!}"],
)
@pytest.mark.timeout(20)
def test_towers_of_powers_are_refused_before_they_are_tried(text: str) -> None:
    assert is_explosive(text)
    assert list(step_one(MATH, text, {"ground_truth": "1"}).rewards) == [0.0]


@pytest.mark.parametrize(
    "text",
    [
        "x^2 + 3y^2",
        "e^{x^2}",
        "2^{10}",
        "10^{-3}",
        "3^2 + 4^2 = 25",
        "5! = 120",
        "\\boxed{2^{1000}}",
        "(x+1)^2 (x+2)^3",
    ],
)
def test_ordinary_mathematics_is_not_refused(text: str) -> None:
    assert not is_explosive(text)


@pytest.mark.parametrize("truth", [None, "", "  ", True, [16], "$$"])
def test_a_ground_truth_that_cannot_be_read_names_its_row(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"row 'q7': metadata\.ground_truth"):
        MATH.step([log_of("16")], [{"ground_truth": truth, "idx": "q7"}])


def test_a_row_without_metadata_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"metadata\.ground_truth"):
        MATH.step([log_of("16")], [None])


@pytest.mark.parametrize("isolation", ["Inline", "Process"])
def test_grading_works_in_threads_and_in_child_processes(isolation: str) -> None:
    async def grade() -> Any:
        spec = PlainSpec(name="math", type="math", entrypoint=None, config={})
        executor = make_executor(spec, isolation=isolation, processes=1, timeout=60)
        try:
            return await executor.step([log_of("\\boxed{16}")], [{"ground_truth": "16"}])
        finally:
            await executor.close()

    assert [outcome.reward for outcome in asyncio.run(grade())] == [1.0]
    assert threading.current_thread() is threading.main_thread()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=60), st.text("0123456789+-*/^(){}\\$frac! ", max_size=30)), max_size=4))
def test_a_batch_equals_its_singles_and_nothing_raises(replies: list[str]) -> None:
    metadata: list[dict[str, Any] | None] = [{"ground_truth": "2"}] * len(replies)
    batch = step_all(MATH, replies, metadata)
    for index, reply in enumerate(replies):
        single = step_one(MATH, reply, metadata[index])
        assert [column[index] for column in batch] == [column[0] for column in single]


def test_generated_problems_are_graded_right_by_their_own_truth() -> None:
    rows = MATH.generate_dataset(30, 5)
    assert rows == MATH.generate_dataset(40, 5)[:30]
    for row in rows:
        truth = row["metadata"]["ground_truth"]
        assert list(step_one(MATH, f"\\boxed{{{truth}}}", row["metadata"]).rewards) == [1.0]
        assert list(step_one(MATH, f"\\boxed{{{truth}1}}", row["metadata"]).rewards) == [0.0]
        assert row["idx"] == row["metadata"]["idx"]


def test_metrics() -> None:
    batch = {"extra_env_info": [{"correct": True}, {"correct": False}, None, {}]}
    same, metrics = MATH.global_post_process_and_metrics(batch)
    assert same is batch
    assert metrics == {"episodes": 4, "accuracy": 0.25}
    assert MATH.global_post_process_and_metrics({"extra_env_info": []})[1] == {"episodes": 0}
