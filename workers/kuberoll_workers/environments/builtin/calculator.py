"""Calculator: multi-step arithmetic with a tool that performs one operation per call."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from kuberoll_workers.environments.builtin.arithmetic import (
    LARGEST,
    OPERATORS,
    CalculationError,
    evaluate,
    parse_number,
    render_number,
    same_number,
)
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.turn import Turn, TurnEnvironment, count_of, first_tagged, mean
from kuberoll_workers.environments.interface import Metadata, ScoringCase, UnusableRow

STOP_STRINGS = ("</call>", "</answer>")
_TAGS = ("call", "answer")
_Operator = Literal["+", "-", "*", "/"]


class CalculatorConfig(EnvironmentConfig):
    """Length and size of the problems."""

    steps: int = Field(default=2, ge=1, le=16, description="Number of operations in a problem.")
    min_operand: int = Field(default=1, ge=-1_000_000, le=1_000_000, description="Smallest number in a problem.")
    max_operand: int = Field(default=20, ge=-1_000_000, le=1_000_000, description="Largest number in a problem.")
    operators: list[_Operator] = Field(
        default=["+", "-", "*"], min_length=1, max_length=4, description="Operations to draw from: + - * /."
    )
    max_calls: int = Field(
        default=8, ge=1, le=100_000, description="Maximum number of calls; after that, only an answer is accepted."
    )

    @model_validator(mode="after")
    def _drawable(self) -> Self:
        if self.min_operand > self.max_operand:
            raise ValueError(f"minOperand {self.min_operand} is above maxOperand {self.max_operand}")
        if self.operators == ["/"] and self.min_operand == self.max_operand == 0:
            raise ValueError("a division needs an operand other than 0: raise maxOperand")
        largest = max(abs(self.min_operand), abs(self.max_operand))
        if "*" in self.operators and largest ** (self.steps + 1) > LARGEST:
            raise ValueError(f"{self.steps} products of numbers up to {largest} can be beyond 10^15: lower one of them")
        return self


class CalculatorEnvironment(TurnEnvironment):
    """The policy writes `<call>3 + 5</call>`, gets `<result>8</result>`, and ends with `<answer>16</answer>`.

    The reward is 1 for the right answer; any answer ends the episode. Every turn without an answer counts as a call,
    even a malformed one; after `maxCalls` calls, the next turn must be the answer or the episode ends.

    Episode state: `problem`, `expected_answer` (a number, as text or JSON number), `calls`, and `correct` at the end.
    """

    row_metadata: ClassVar[Mapping[str, str]] = {
        "expected_answer": "a decimal number, as text or number",
        "calls": "calls used so far, 0 if absent",
    }
    scoring_cases: ClassVar[Sequence[ScoringCase]] = [
        ScoringCase(row={"metadata": {"expected_answer": expected}}, responses=responses, reward=reward)
        for expected, responses, reward in [
            ("16", ["<call>3 + 5</call>", "<answer>16</answer>"], 1.0),
            ("16", ["<answer>16</answer>"], 1.0),
            (16, ["It is <answer> 16.0 </answer>"], 1.0),
            (0.5, ["<answer>0.5</answer>"], 1.0),
            ("-7", ["<answer>-7</answer>"], 1.0),
            ("16", ["<call>3 + 5</call>", "<answer>8</answer>"], 0.0),
            ("16", ["<answer>8 + 8</answer>"], 0.0),
            ("16", ["<answer>15 or 16</answer>"], 0.0),
            ("16", ["<answer></answer>"], 0.0),
            ("16", ["<answer>1</answer><answer>16</answer>"], 0.0),
            ("16", ["16"], 0.0),
        ]
    ]

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(CalculatorConfig, config)

    def check_row(self, metadata: Metadata) -> None:
        """
        Raises:
            UnusableRow: The row has no expected answer.
        """
        _state_of(metadata or {})

    def turn(self, reply: str, state: dict[str, Any]) -> Turn:
        """See `TurnEnvironment.turn`."""
        expected, calls = _state_of(state)
        tagged = first_tagged(reply, _TAGS)
        if tagged is not None and tagged.name == "answer":
            given = parse_number(tagged.body)
            correct = given is not None and same_number(given, expected)
            return Turn(
                observation="\nCorrect.\n" if correct else f"\nWrong: it is {render_number(expected)}.\n",
                metadata={**state, "calls": calls, "correct": correct},
                reward=1.0 if correct else 0.0,
                terminated=True,
                # Only numbers take part in voting; their parser bounds the length of the answer.
                answer=None if given is None else render_number(given),
            )
        if calls >= self._config.max_calls:
            return Turn(
                observation="\n<error>no answer was given</error>\n",
                metadata={**state, "calls": calls + 1, "correct": False},
                terminated=True,
            )
        observation = f"\n{_result(None if tagged is None else tagged.body)}\n"
        if calls + 1 == self._config.max_calls:
            observation += "No calls are left: write the answer.\n"
        return Turn(observation, metadata={**state, "calls": calls + 1}, stop_strings=STOP_STRINGS)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `accuracy`, `answered_rate`, and, if any answer was correct, `mean_calls_of_correct`."""
        states = [state or {} for state in batch["extra_env_info"]]
        calls = [state["calls"] for state in states if state.get("correct")]
        answered = sum("correct" in state and state["calls"] <= self._config.max_calls for state in states)
        metrics = {
            "episodes": len(states),
            "accuracy": len(calls) / len(states) if states else None,
            "answered_rate": answered / len(states) if states else None,
            "mean_calls_of_correct": mean(calls),
        }
        return batch, {name: value for name, value in metrics.items() if value is not None}

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with problems whose intermediate results are whole numbers; a longer dataset starts with the shorter
        one.
        """
        draw = random.Random(seed)
        return [self._row(index, *self._problem(draw)) for index in range(count)]

    def _row(self, index: int, problem: str, value: Fraction) -> dict[str, Any]:
        prompt = (
            f"Calculate {problem}.\n"
            "Each turn, write one operation, as in <call>7 + 6</call>; you get its result, as in <result>13</result>. "
            "When you know the final result, write it, as in <answer>13</answer>.\n"
        )
        return {
            "messages": [{"role": "user", "content": prompt}],
            "metadata": {"problem": problem, "expected_answer": render_number(value), "calls": 0},
            "stop_strings": list(STOP_STRINGS),
            "idx": index,
        }

    def _problem(self, draw: random.Random) -> tuple[str, Fraction]:
        """A random problem and its value: a chain in which each result is an operand of the next operation."""
        text, value = self._operand(draw)
        for step in range(self._config.steps):
            part = f"({text})" if step else text
            while True:
                other, number = self._operand(draw)
                symbol = draw.choice(self._config.operators)
                chain_first = draw.random() < 0.5
                left, right = (value, number) if chain_first else (number, value)
                # Divisions without a whole result are drawn again.
                if symbol != "/" or (right != 0 and (left / right).denominator == 1):
                    break
            text = f"{part} {symbol} {other}" if chain_first else f"{other} {symbol} {part}"
            value = OPERATORS[symbol](left, right)
        return text, value

    def _operand(self, draw: random.Random) -> tuple[str, Fraction]:
        number = draw.randint(self._config.min_operand, self._config.max_operand)
        return str(number), Fraction(number)


def _state_of(state: Mapping[str, Any]) -> tuple[Fraction, int]:
    """The expected answer, and the number of calls so far."""
    return _expected(state), count_of(state, "calls")


def _expected(state: Mapping[str, Any]) -> Fraction:
    value = state.get("expected_answer")
    number = parse_number(str(value)) if isinstance(value, (str, int, float)) else None
    if number is None:
        raise UnusableRow(f"metadata.expected_answer: found {value!r}; it must be a decimal number")
    return number


def _result(expression: str | None) -> str:
    """The tool's answer to a call; None: the reply has no call."""
    if expression is None:
        return "<error>write <call>7 + 6</call> or <answer>13</answer></error>"
    try:
        return f"<result>{render_number(evaluate(expression))}</result>"
    except CalculationError as error:
        return f"<error>{error}</error>"
