"""Math: one answer to one question, compared with the ground truth by math-verify."""

from __future__ import annotations

import functools
import importlib
import logging
import random
import re
from collections.abc import Mapping
from fractions import Fraction
from types import ModuleType
from typing import Any

from pydantic import Field

from kuberoll_workers.environments.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Metadata,
    UnusableRow,
)
from kuberoll_workers.environments.turn import Turn, batch_of, reply_of

GROUND_TRUTH_KEYS = ("ground_truth", "expected_answer")


class MathAnswersConfig(EnvironmentConfig):
    """What is read of a response, and the numbers of generated problems."""

    max_characters: int = Field(
        default=4000,
        ge=16,
        le=1_000_000,
        description="Characters at a response's end that the answer is looked for in.",
    )
    max_number: int = Field(default=20, ge=2, le=1_000_000, description="Largest number in a generated problem.")


class MathAnswersEnvironment(EnvironmentInterface):
    """Single turn: the reward is 1 where the response's answer equals the ground truth, and the episode ends.

    The ground truth, a number or LaTeX, is `metadata.ground_truth` or `metadata.expected_answer`. A response without
    an answer, or with one that cannot be read, gets 0: the policy is at fault. A ground truth that cannot be read is
    the dataset's fault, and an error.

    Grading may take long on expressions that a policy made up. The step timeout of the job is its only limit, and
    only isolation Process can enforce it: math-verify's own limits need the main thread, and differ between it and
    others. The worst known cases, towers of powers, are refused before they are tried.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is wrong; the message names the key.
        """
        self._config = parse_config(MathAnswersConfig, config)

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        """Grade each response.

        Raises:
            UnusableRow: A row has no readable ground truth; names the row's `idx` where its metadata has one.
        """
        pairs = zip(message_log_batch, metadata, strict=True)
        return batch_of([self._turn(reply_of(log), state or {}) for log, state in pairs])

    def _turn(self, reply: str, state: Mapping[str, Any]) -> Turn:
        truth = _read_truth(_ground_truth(state))
        found = _read_answer(reply[-self._config.max_characters :])
        correct = bool(found) and _equal(truth, found)
        return Turn(
            observation="\nCorrect.\n" if correct else "\nWrong.\n",
            metadata={**state, "correct": correct},
            reward=1.0 if correct else 0.0,
            terminated=True,
            # math-verify returns the expression and, last, the text that it was read from.
            answer=found[-1] if found and isinstance(found[-1], str) else None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Adds `accuracy`."""
        states = [state or {} for state in batch["extra_env_info"]]
        correct = sum(bool(state.get("correct")) for state in states)
        accuracy = {"accuracy": correct / len(states)} if states else {}
        return batch, {"episodes": len(states), **accuracy}

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with small problems of arithmetic, fractions and linear equations, in turn."""
        draw = random.Random(seed)
        makers = (_arithmetic, _fractions, _linear)
        problems = (makers[index % len(makers)](self._config.max_number, draw) for index in range(count))
        return [_row(index, question, truth) for index, (question, truth) in enumerate(problems)]


def _ground_truth(state: Mapping[str, Any]) -> str:
    value = next((state[key] for key in GROUND_TRUTH_KEYS if state.get(key) is not None), None)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        raise UnusableRow(
            f"{_row_name(state)}metadata.ground_truth: found {value!r}; it must be the right answer, a number or LaTeX"
        )
    text = str(value).strip()
    if not _read_truth(text):
        raise UnusableRow(f"{_row_name(state)}metadata.ground_truth: {text[:80]!r} cannot be read as mathematics")
    return text


def _row_name(state: Mapping[str, Any]) -> str:
    return f"row {state['idx']!r}: " if "idx" in state else ""


@functools.lru_cache(maxsize=4096)
def _read_truth(text: str) -> tuple[Any, ...]:
    """The ground truth's readings; cached, as all samples of a prompt share it."""
    # Bare LaTeX is read as mathematics only between delimiters.
    return _parse(text) or _parse(f"${text}$")


def _read_answer(response: str) -> tuple[Any, ...]:
    return () if is_explosive(response) else _parse(response)


def _parse(text: str) -> tuple[Any, ...]:
    return tuple(_math_verify().parse(text, parsing_timeout=None))


def _equal(truth: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
    # Whatever sympy raises while it compares means "not equal" to math-verify.
    return bool(_math_verify().verify(list(truth), list(found), timeout_seconds=None))


@functools.cache
def _math_verify() -> ModuleType:
    # Half a second, and sympy: only where mathematics is graded.
    library = importlib.import_module("math_verify")
    # It warns that its timeouts are off; time limits are the job's (see MathAnswersEnvironment).
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    return library


_POWER = r"(?:\^|\*\*)"
_EXPLOSIVE = re.compile(
    rf"{_POWER}[\s{{(+-]*[0-9]{{5,}}"  # an exponent of 5 digits or more
    rf"|{_POWER}[\s{{(]*[-+]?\s*[0-9.]*[\s)}}]*{_POWER}"  # a power in an exponent, or a chain of powers
    rf"|[0-9\s)}}]{_POWER}[\s]*[{{(][^{{}}()$]*[0-9]\s*(?:{_POWER}|!)"  # a number's exponent that holds a power
    rf"|[)}}]\s*{_POWER}[\s{{(]*[0-9]{{3,}}"  # a bracket to the power of 3 digits or more
    r"|[0-9]{5,}\s*!|![\s)}]*!"  # the factorial of 5 digits or more, or of a factorial
)


def is_explosive(text: str) -> bool:
    """Whether evaluating a text could take for ever: numbers such as 9^(9^9), which sympy would write out.

    A guard, not a proof: what it does not know, the step timeout has to stop.
    """
    return _EXPLOSIVE.search(text) is not None


def _row(index: int, question: str, truth: Fraction) -> dict[str, Any]:
    prompt = f"{question} Think step by step and put the final answer in \\boxed{{}}."
    return {
        "messages": [{"role": "user", "content": prompt}],
        "metadata": {"ground_truth": str(truth), "idx": index},
        "idx": index,
    }


def _arithmetic(largest: int, draw: random.Random) -> tuple[str, Fraction]:
    a, b, c = (draw.randint(1, largest) for _ in range(3))
    return f"What is {a} + {b} * {c}?", Fraction(a + b * c)


def _fractions(largest: int, draw: random.Random) -> tuple[str, Fraction]:
    a, c = draw.randint(1, largest), draw.randint(1, largest)
    b, d = draw.randint(2, largest), draw.randint(2, largest)
    return f"What is {a}/{b} + {c}/{d}, in lowest terms?", Fraction(a, b) + Fraction(c, d)


def _linear(largest: int, draw: random.Random) -> tuple[str, Fraction]:
    a, x, b = draw.randint(2, largest), draw.randint(-largest, largest), draw.randint(1, largest)
    return f"Solve {a}x + {b} = {a * x + b} for x.", Fraction(x)
