from __future__ import annotations

import asyncio
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.data.causes import Cause, Evidence
from kuberoll_workers.environments.batches import StepBatch
from kuberoll_workers.environments.builtin.math import extraction as math_extraction
from kuberoll_workers.environments.builtin.math.answers import MathAnswersEnvironment, is_explosive
from kuberoll_workers.environments.builtin.math.extraction import MAX_ANSWER_CHARACTERS, final_answers
from kuberoll_workers.environments.builtin.math.process import AlgebraProcess
from kuberoll_workers.environments.builtin.math.values import read_value
from kuberoll_workers.environments.builtin.question_process import LimitExceeded, ProcessLost
from kuberoll_workers.environments.exception_causes import cause_of
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.registry import PlainSpec
from tests.environments.support import log_of, step_all, step_one
from tests.examples import examples

MATH = MathAnswersEnvironment({})


class Case(NamedTuple):
    category: str
    truth: str
    response: str


def cases(file: str) -> Iterator[Case]:
    """The cases of a list in `data/`."""
    category = ""
    for line in (Path(__file__).parent / "data" / file).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        truth, arrow, response = line.partition("⇒")
        if not arrow:
            category = line.strip("[]") if line.startswith("[") else category
        else:
            yield Case(category, truth.strip(), response.strip().replace("⏎", "\n"))


ACCEPTED = list(cases("math_accepted.txt"))
REFUSED = list(cases("math_refused.txt"))


def reward(case: Case) -> float:
    return float(step_one(MATH, case.response, {"ground_truth": case.truth}).rewards[0])


@pytest.mark.slow
@pytest.mark.parametrize("category", sorted({case.category for case in ACCEPTED}))
def test_right_answers_are_rewarded_however_they_are_written(category: str) -> None:
    chosen = [case for case in ACCEPTED if case.category == category]
    assert [case for case in chosen if reward(case) != 1.0] == []


@pytest.mark.parametrize("category", sorted({case.category for case in REFUSED}))
def test_near_misses_are_worth_nothing(category: str) -> None:
    chosen = [case for case in REFUSED if case.category == category]
    assert [case for case in chosen if reward(case) != 0.0] == []


def test_the_lists_are_long() -> None:
    assert len(set(ACCEPTED)) >= 200
    assert len(set(REFUSED)) >= 200
    assert not {case[1:] for case in ACCEPTED} & {case[1:] for case in REFUSED}


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
@pytest.mark.timeout(120)
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


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["Inline", "Process"])
def test_grading_works_in_threads_and_in_child_processes(isolation: str) -> None:
    async def grade() -> Any:
        spec = PlainSpec(name="math", type="math", entrypoint=None, config={})
        executor = make_executor(spec, isolation=isolation, processes=1, timeout=60)
        try:
            return await executor.run(
                StepBatch.of_columns([log_of("\\boxed{\\sqrt{8}}")], [{"ground_truth": "2\\sqrt{2}"}])
            )
        finally:
            await executor.close()

    assert [outcome.reward for outcome in asyncio.run(grade())] == [1.0]
    assert threading.current_thread() is threading.main_thread()


@settings(max_examples=examples(40), deadline=None)
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


@pytest.mark.parametrize("truth", ["\\frac{", "x } 7", "\\begin{pmatrix} 1 & 2"])
def test_a_ground_truth_that_is_torn_latex_is_the_rows_fault(truth: str) -> None:
    # Where a wrong answer fails, the same answer as the truth may not be recorded as right: the sample would be biased.
    for reply in ("\\boxed{3}", truth):
        with pytest.raises(ValueError, match=r"metadata\.ground_truth.*read as mathematics"):
            MATH.step([log_of(reply)], [{"ground_truth": truth}])


LONG_COMPUTATION = "\\sum_{k=1}^{9999} \\sum_{m=1}^{9999} \\sin(k^2 m + \\sqrt{k + m})"


@pytest.mark.slow
def test_an_answer_that_needs_too_much_processor_time_is_worth_nothing_and_is_marked() -> None:
    math = MathAnswersEnvironment({"cpuSeconds": 1.0})
    hard = step_one(math, f"\\boxed{{{LONG_COMPUTATION}}}", {"ground_truth": "\\sqrt{2} + 1"})
    assert list(hard.rewards) == [0.0]
    assert hard.metadata[0] == {"ground_truth": "\\sqrt{2} + 1", "correct": False, "grading": "limit"}
    # The process that was ended is replaced.
    easy = step_one(math, "\\boxed{1 + \\sqrt{2}}", {"ground_truth": "\\sqrt{2} + 1"})
    assert list(easy.rewards) == [1.0]
    assert easy.metadata[0] == {"ground_truth": "\\sqrt{2} + 1", "correct": True}


@pytest.mark.slow
def test_algebra_within_a_computation_of_c_is_ended_too() -> None:
    with AlgebraProcess(cpu_seconds=1.0) as algebra:
        # One power of integers: no Python code runs while it is computed.
        with pytest.raises(LimitExceeded):
            algebra.ask("equal", "7^{9999999} - 7^{9999998}", "7^{7777777} + 1")
        assert algebra.ask("equal", "\\sqrt{8}", "2\\sqrt{2}") is True
        assert algebra.ask("equal", "\\sqrt{8}", "\\frac{") is None


@pytest.mark.slow
def test_an_algebra_process_that_is_killed_is_a_failure_and_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    with AlgebraProcess() as algebra:
        assert algebra.ask("equal", "x", "x") is True
        process = algebra._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        wait = select.select

        def killing(*arguments: Any) -> Any:
            # The question has been sent.
            process.kill()
            return wait(*arguments)

        monkeypatch.setattr(select, "select", killing)
        with pytest.raises(ProcessLost, match="SIGKILL"):
            algebra.ask("equal", "x", "x")
        monkeypatch.undo()
        assert algebra.ask("equal", "x", "x") is True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_copy_that_the_machine_kills_has_not_exceeded_its_limits(number: signal.Signals) -> None:
    """As the kernel does without memory: the answer may be right, and has no reward of 0."""
    with AlgebraProcess(cpu_seconds=60.0) as algebra, ThreadPoolExecutor(1) as threads:
        assert algebra.ask("equal", "x", "x") is True
        assert algebra._process is not None
        (copy,) = psutil.Process(algebra._process.pid).children()
        asked = threads.submit(algebra.ask, "equal", "7^{9999999} - 7^{9999998}", "7^{7777777} + 1")
        before = copy.cpu_times().user
        while copy.cpu_times().user == before:
            # It computes.
            threading.Event().wait(0.01)
        copy.send_signal(number)
        with pytest.raises(ProcessLost, match=number.name) as lost:
            asked.result()
        assert cause_of(lost.value) == Cause("ProcessKilled", Evidence(signal=number.name))
        assert algebra.ask("equal", "x", "x") is True


@pytest.mark.slow
def test_the_algebra_process_ends_with_its_client() -> None:
    algebra = AlgebraProcess()
    assert algebra.ask("equal", "x", "x") is True
    process = algebra._process
    assert process is not None
    algebra.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_what_the_algebra_process_is_told_is_no_variable_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEROLL_TOKEN_GENERATE", "secret")
    with AlgebraProcess() as algebra:
        assert algebra.ask("equal", "x", "x") is True
        assert algebra._process is not None
        assert b"KUBEROLL" not in Path(f"/proc/{algebra._process.pid}/environ").read_bytes()


ALPHABET = [
    "1",
    "1,",
    " ",
    "\n",
    "x",
    "=",
    "$",
    "$a ",
    "\\(",
    "\\[",
    "\\boxed{",
    "\\boxed{1}",
    "}",
    "{",
    "\\",
    "answer is ",
    "#",
    "^",
]


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=3))
def test_looking_for_the_answer_takes_steps_in_proportion_to_the_response(pieces: list[str]) -> None:
    unit = "".join(pieces)

    def steps(copies: int) -> int:
        count = 0

        def trace(*_: Any) -> Any:
            nonlocal count
            count += 1
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            final_answers(unit * copies)
            is_explosive(unit * copies)
        finally:
            sys.settrace(previous)
        return count

    assert steps(800) <= 2.2 * steps(400) + 100


def test_patterns_that_see_a_whole_response_have_no_repeat_without_bound() -> None:
    parse = re._parser.parse  # type: ignore[attr-defined]

    def unbounded(tree: Any) -> bool:
        found = False
        for operation, argument in tree:
            if str(operation) in ("MAX_REPEAT", "MIN_REPEAT"):
                _, most, inner = argument
                found = found or int(most) > 100 or unbounded(inner)
            elif str(operation) == "SUBPATTERN":
                found = found or unbounded(argument[-1])
            elif str(operation) == "BRANCH":
                found = found or any(unbounded(branch) for branch in argument[1])
        return found

    assert unbounded(parse("a*"))
    for pattern in (math_extraction._BOX, math_extraction._MARKER, math_extraction._RETRACTION):
        assert not unbounded(parse(pattern.pattern)), pattern.pattern


def test_long_answers_are_no_answers() -> None:
    assert final_answers("\\boxed{" + "1+" * MAX_ANSWER_CHARACTERS + "1}") == []


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.sampled_from([*ALPHABET, "(", ")", "[", ",", "\\text{", "\\pm", "<", "\\cup", "and", "/", "%"]), max_size=40
    )
)
def test_reading_an_answer_never_raises(pieces: list[str]) -> None:
    read_value("".join(pieces))
