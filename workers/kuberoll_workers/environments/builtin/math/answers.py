"""Math: one answer to one question, compared with the ground truth."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from pydantic import Field

from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.math.equality import equal_values
from kuberoll_workers.environments.builtin.math.extraction import final_answers
from kuberoll_workers.environments.builtin.math.process import CPU_SECONDS, AlgebraLimit, AlgebraProcess
from kuberoll_workers.environments.builtin.math.values import (
    Assignment,
    Expression,
    Group,
    Quantity,
    Relation,
    Union,
    Value,
    read_value,
)
from kuberoll_workers.environments.builtin.turn import Turn, batch_of, reply_of
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Metadata,
    UnusableRow,
)

GROUND_TRUTH_KEYS = ("ground_truth", "expected_answer")


class MathAnswersConfig(EnvironmentConfig):
    """Limits of grading, and the size of generated problems."""

    max_characters: int = Field(
        default=4000,
        ge=16,
        le=1_000_000,
        description="Number of characters at the end of a response in which the answer is searched.",
    )
    cpu_seconds: float = Field(
        default=CPU_SECONDS,
        ge=0.1,
        le=300,
        description="CPU seconds for the comparison of two expressions; an answer that needs more gets 0.",
    )
    max_number: int = Field(default=20, ge=2, le=1_000_000, description="Largest number in a generated problem.")


class MathAnswersEnvironment(EnvironmentInterface):
    """Single turn: the reward is 1 if the response's answer equals the ground truth; the episode ends.

    The ground truth is `metadata.ground_truth` or `metadata.expected_answer`: a number, LaTeX with or without
    delimiters, or words. The reward is 0 if a response has no answer, an answer that cannot be parsed, or one whose
    comparison takes more than `cpuSeconds` of CPU time (`metadata.grading` is `limit` then): these are the policy's
    mistakes. A ground truth that cannot be parsed is the dataset's mistake, and a failure; so is an algebra process
    that
    does not work, which says nothing about the answer.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(MathAnswersConfig, config)
        self._algebra = AlgebraProcess(cpu_seconds=self._config.cpu_seconds)
        self._truth = functools.lru_cache(maxsize=4096)(functools.partial(_read_truth, self._algebra))

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        """Grade each response.

        Raises:
            UnusableRow: A row has no valid ground truth; the message names the row's `idx`, if its metadata has one.
            AlgebraFailed: The algebra process does not work.
        """
        pairs = zip(message_log_batch, metadata, strict=True)
        return batch_of([self._turn(reply_of(log), state or {}) for log, state in pairs])

    def _turn(self, reply: str, state: Mapping[str, Any]) -> Turn:
        text = _ground_truth(state)
        truth = self._truth(text)
        if isinstance(truth, str):
            raise UnusableRow(f"{_row_name(state)}metadata.ground_truth: {text[:80]!r} {truth}")
        answers = final_answers(reply[-self._config.max_characters :])
        grading: dict[str, Any] = {}
        try:
            correct = bool(answers) and all(is_right(truth, answer, self._algebra) for answer in answers)
        except AlgebraLimit:
            correct, grading = False, {"grading": "limit"}
        return Turn(
            observation="\nCorrect.\n" if correct else "\nWrong.\n",
            metadata={**state, "correct": correct, **grading},
            reward=1.0 if correct else 0.0,
            terminated=True,
            answer=answers[-1] if answers else None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `accuracy`."""
        states = [state or {} for state in batch["extra_env_info"]]
        correct = sum(bool(state.get("correct")) for state in states)
        accuracy = {"accuracy": correct / len(states)} if states else {}
        return batch, {"episodes": len(states), **accuracy}

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with small problems, alternating between arithmetic, fractions and linear equations."""
        draw = random.Random(seed)
        makers = (_arithmetic, _fractions, _linear)
        problems = (makers[index % len(makers)](self._config.max_number, draw) for index in range(count))
        return [_row(index, question, truth) for index, (question, truth) in enumerate(problems)]


def is_right(truth: Value, answer: str, algebra: AlgebraProcess) -> bool:
    """True if a final answer, as text, states the value of the ground truth.

    Raises:
        AlgebraLimit: The comparison exceeds its limits.
        AlgebraFailed: The algebra process does not work.
    """
    value = read_value(answer)

    def compare(question: str, ours: str, theirs: str) -> bool:
        if is_explosive(theirs):
            raise AlgebraLimit(question)
        return algebra.ask(question, ours, theirs) is True

    return value is not None and equal_values(truth, value, compare)


def _ground_truth(state: Mapping[str, Any]) -> str:
    value = next((state[key] for key in GROUND_TRUTH_KEYS if state.get(key) is not None), None)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        raise UnusableRow(
            f"{_row_name(state)}metadata.ground_truth: found {value!r}; it must be the right answer, a number, LaTeX "
            "or words"
        )
    return str(value).strip()


def _row_name(state: Mapping[str, Any]) -> str:
    return f"row {state['idx']!r}: " if "idx" in state else ""


_SENTENCE = re.compile(r"\\(?:boxed|fbox)\s*\{|####|\banswer\b\s*(?:is|:|=)", re.IGNORECASE)


def _read_truth(algebra: AlgebraProcess, text: str) -> Value | str:
    """The value of a ground truth, or a message if it is invalid."""
    stated = final_answers(text) if _SENTENCE.search(text) else [text]
    value = read_value(stated[0]) if len(stated) == 1 else None
    if value is None:
        return "cannot be read as one answer: write it as a number, as LaTeX or in words"
    try:
        unreadable = next((part for part in _expressions(value) if algebra.ask("readable", part, "") is False), None)
    except AlgebraLimit:
        return "takes longer to read than config.cpuSeconds; write it in a simpler form"
    if unreadable is not None:
        return f"has a part that cannot be read as mathematics: {unreadable[:80]!r}"
    return value


def _expressions(value: Value) -> list[str]:
    """All pieces of LaTeX in a value."""
    if isinstance(value, Expression):
        return [value.latex]
    if isinstance(value, Quantity | Assignment):
        return _expressions(value.value)
    if isinstance(value, Relation):
        return [value.left, value.right]
    parts = value.items if isinstance(value, Group) else value.parts if isinstance(value, Union) else ()
    return [latex for part in parts for latex in _expressions(part)]


_TOKEN = re.compile(r"\^|[0-9]+(?:\.[0-9]+)?|[!(){}\[\]]|[^\s]")
_MAX_DIGITS = 4


def is_explosive(text: str) -> bool:
    """True if a power in an exponent, or a large exponent or factorial, makes a number too long to write out.

    Linear in the length of the text. This only saves time: computations that it does not detect are stopped by the
        limits.
    """
    # For each open bracket: True if it is within an exponent.
    exponents: list[bool] = []
    previous = before = ""
    for token in _TOKEN.findall(text.replace("**", "^")):
        raised = previous == "^" or (before == "^" and previous in ("-", "+"))
        within = bool(exponents) and exponents[-1]
        number = previous[:1].isdigit()
        if token in ("(", "{", "["):
            exponents.append(raised or within)
        elif token in (")", "}", "]"):
            del exponents[-1:]
        elif token[0].isdigit():
            if (raised or within) and len(token.partition(".")[0]) > _MAX_DIGITS:
                return True
        elif token == "^":
            if number and (within or before == "^"):
                return True
        elif token == "!" and (
            previous in ("!", ")", "}") or (number and (within or before == "^" or len(previous) > _MAX_DIGITS))
        ):
            return True
        before, previous = previous, token
    return False


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
