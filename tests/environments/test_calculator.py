from __future__ import annotations

import ast
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kuberoll_workers.environments.builtin.arithmetic import (
    LARGEST,
    OPERATORS,
    CalculationError,
    evaluate,
    parse_number,
    render_number,
    same_number,
)
from kuberoll_workers.environments.builtin.calculator import CalculatorEnvironment
from tests.environments.support import step_all, step_one
from tests.examples import examples

STATE = {"problem": "(3 + 5) * 2", "expected_answer": "16", "calls": 0}


def python_value(node: ast.AST) -> Fraction:
    """The value of an expression by Python's own grammar, in exact fractions."""
    match node:
        case ast.Expression(body=body):
            return python_value(body)
        case ast.Constant(value=int() as value):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -python_value(operand)
        case ast.BinOp(left=left, op=operation, right=right):
            symbol = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}[type(operation)]
            return OPERATORS[symbol](python_value(left), python_value(right))
    raise AssertionError(ast.dump(node))


@given(
    st.integers(-(10**6), 10**6),
    st.sampled_from(sorted(OPERATORS)),
    st.integers(-(10**6), 10**6),
    st.text(" \t", max_size=3),
)
def test_the_evaluator_agrees_with_python(left: int, symbol: str, right: int, space: str) -> None:
    assume(symbol != "/" or right != 0)
    expression = f"{left}{space}{symbol}{space}{right}"
    value = evaluate(expression)
    assert value == python_value(ast.parse(expression, mode="eval"))
    assert abs(float(render_number(value)) - eval(expression)) < 1e-6


@given(st.integers(-(10**15), 10**15), st.integers(1, 10**6))
def test_a_rendered_number_reads_back(numerator: int, denominator: int) -> None:
    value = Fraction(numerator, denominator)
    read = parse_number(render_number(value))
    assert read is not None
    if value.denominator == 1:
        assert read == value
    elif abs(value) < 10**9:
        assert same_number(read, value)


@pytest.mark.parametrize(
    ("value", "text"),
    [("16", "16"), ("-3", "-3"), ("7/2", "3.5"), ("1/3", "0.333333"), ("-1/3000000000", "0"), ("100", "100")],
)
def test_numbers_are_rendered_for_reading(value: str, text: str) -> None:
    assert render_number(Fraction(value)) == text


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1 / 0", "division by zero"),
        ("1 / 0.0", "division by zero"),
        ("", "write one operation"),
        ("(3 + 5) * 2", "write one operation"),
        ("3", "write one operation"),
        ("2 ** 9", "write one operation"),
        ("9 ^ 9", "write one operation"),
        ("__import__('os')", "write one operation"),
        ("\u0663 + 1", "write one operation"),
        ("1e9 + 1", "write one operation"),
        (f"{LARGEST} * 2", "too large"),
        (f"{10**16} - {10**16}", "too large"),
        ("1" * 100 + " + 1", "at most 64 characters"),
    ],
)
def test_what_cannot_be_calculated(expression: str, said: str) -> None:
    with pytest.raises(CalculationError, match=re.escape(said)):
        evaluate(expression)
    result = step_one(CalculatorEnvironment({}), f"<call>{expression}</call>", STATE)
    assert re.fullmatch(r"\n<error>.*</error>\n", result.observations[0]["content"])
    assert said in result.observations[0]["content"]
    assert list(result.rewards) == [0.0]
    assert list(result.terminateds) == [False]
    assert result.metadata[0] == {**STATE, "calls": 1}


def test_a_problem_is_worked_out() -> None:
    calculator = CalculatorEnvironment({})
    first = step_one(calculator, "First <call>3 + 5</call>.", STATE)
    assert first.observations[0] == {"role": "environment", "content": "\n<result>8</result>\n"}
    assert first.next_stop_strings == [["</call>", "</answer>"]]
    second = step_one(calculator, "<call>8*2</call>", first.metadata[0])
    assert second.observations[0]["content"] == "\n<result>16</result>\n"
    last = step_one(calculator, "<answer> 16.0 </answer>", second.metadata[0])
    assert last.observations[0]["content"] == "\nCorrect.\n"
    assert last.metadata[0] == {**STATE, "calls": 2, "correct": True}
    assert (list(last.rewards), list(last.terminateds), last.answers) == ([1.0], [True], ["16"])
    assert last.next_stop_strings == [None]


@pytest.mark.parametrize(
    ("answer", "told"), [("17", "17"), ("", None), ("sixteen", None), ("1" * 100, None), ("16 or so", None)]
)
def test_a_wrong_answer_ends_the_episode(answer: str, told: str | None) -> None:
    result = step_one(CalculatorEnvironment({}), f"<answer>{answer}</answer>", STATE)
    assert result.observations[0]["content"] == "\nWrong: it is 16.\n"
    assert (list(result.rewards), list(result.terminateds), result.answers) == ([0.0], [True], [told])
    assert result.metadata[0]["correct"] is False


def test_after_the_last_call_only_an_answer_is_taken() -> None:
    calculator = CalculatorEnvironment({"maxCalls": 2})
    second = step_one(calculator, "<call>8 * 2</call>", {**STATE, "calls": 1})
    assert second.observations[0]["content"] == "\n<result>16</result>\nNo calls are left: write the answer.\n"
    assert list(second.terminateds) == [False]
    answered = step_one(calculator, "<answer>16</answer>", second.metadata[0])
    assert list(answered.rewards) == [1.0]
    for reply in ("<call>1 + 1</call>", "16"):
        over = step_one(calculator, reply, second.metadata[0])
        assert list(over.terminateds) == [True]
        assert list(over.rewards) == [0.0]
        assert over.next_stop_strings == [None]


def test_a_reply_without_a_tag_counts_as_a_call() -> None:
    result = step_one(CalculatorEnvironment({}), "16", STATE)
    assert result.observations[0]["content"] == "\n<error>write <call>7 + 6</call> or <answer>13</answer></error>\n"
    assert result.metadata[0]["calls"] == 1


@pytest.mark.parametrize("expected", [16, 16.0, "16", " 16 "])
def test_the_expected_answer_may_be_a_number_or_text(expected: Any) -> None:
    result = step_one(CalculatorEnvironment({}), "<answer>16</answer>", {"expected_answer": expected})
    assert list(result.rewards) == [1.0]


@pytest.mark.parametrize(
    "metadata", [None, {}, {"expected_answer": None}, {"expected_answer": "x"}, {"expected_answer": [1]}]
)
def test_a_row_without_an_expected_answer_is_an_error(metadata: Any) -> None:
    with pytest.raises(ValueError, match=r"metadata\.expected_answer"):
        CalculatorEnvironment({}).step([[{"role": "assistant", "content": "<call>1 + 1</call>"}]], [metadata])


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["{}", "<call>{}</call>", "<answer>{}</answer>", "<call>{}"]),
            st.one_of(st.text(), st.text("0123456789.+-*/() ", max_size=70)),
            st.integers(0, 9),
        ),
        max_size=5,
    )
)
def test_a_batch_equals_its_singles_and_nothing_raises(episodes: list[tuple[str, str, int]]) -> None:
    calculator = CalculatorEnvironment({})
    replies = [form.replace("{}", text) for form, text, _ in episodes]
    metadata: list[dict[str, Any] | None] = [{**STATE, "calls": calls} for _, _, calls in episodes]
    batch = step_all(calculator, replies, metadata)
    for index, reply in enumerate(replies):
        single = step_one(calculator, reply, metadata[index])
        assert [column[index] for column in batch] == [column[0] for column in single]


CONFIGS = [
    {},
    {"steps": 1},
    {"steps": 5, "operators": ["/"], "minOperand": 2, "maxOperand": 9},
    {"steps": 8, "operators": ["+", "/"], "minOperand": -5, "maxOperand": 5},
    {"steps": 3, "operators": ["*"], "minOperand": 900, "maxOperand": 1000},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_generated_problems_are_what_they_say(config: dict[str, Any]) -> None:
    calculator = CalculatorEnvironment(config)
    rows = calculator.generate_dataset(60, 3)
    assert rows == calculator.generate_dataset(70, 3)[:60]
    assert len({row["metadata"]["problem"] for row in rows}) > 30
    for row in rows:
        problem = row["metadata"]["problem"]
        value = python_value(ast.parse(problem, mode="eval"))
        assert row["metadata"]["expected_answer"] == str(value)
        assert f"Calculate {problem}." in row["messages"][0]["content"]
        assert len(re.findall(r" [-+*/] ", problem)) == config.get("steps", 2)
        assert row["stop_strings"] == ["</call>", "</answer>"]


def test_metrics() -> None:
    states = [{"correct": True, "calls": 2}, {"correct": False, "calls": 1}, {"correct": False, "calls": 9}, None]
    batch = {"extra_env_info": states}
    same, metrics = CalculatorEnvironment({}).global_post_process_and_metrics(batch)
    assert same is batch
    assert metrics == {"episodes": 4, "accuracy": 0.25, "answered_rate": 0.5, "mean_calls_of_correct": 2.0}
    assert CalculatorEnvironment({}).global_post_process_and_metrics({"extra_env_info": []})[1] == {"episodes": 0}
