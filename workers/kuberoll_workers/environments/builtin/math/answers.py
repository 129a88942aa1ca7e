"""Math: one answer to one question, compared with the ground truth."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

from pydantic import Field

from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.math.equality import equal_values
from kuberoll_workers.environments.builtin.math.extraction import final_answers
from kuberoll_workers.environments.builtin.math.process import AlgebraProcess
from kuberoll_workers.environments.builtin.math.values import (
    DOTS,
    Assignment,
    Expression,
    Group,
    Quantity,
    Relation,
    Union,
    Value,
    read_value,
)
from kuberoll_workers.environments.builtin.question_process import CPU_SECONDS, LimitExceeded
from kuberoll_workers.environments.builtin.trials import given_solutions
from kuberoll_workers.environments.builtin.turn import GradedEnvironment, Reply, Turn, grade
from kuberoll_workers.environments.interface import Episode, Metadata, ScoringCase, UnusableRow

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


class MathAnswersEnvironment(GradedEnvironment):
    """Single turn: the reward is 1 if the response's answer equals the ground truth; the episode ends.

    The ground truth is `metadata.ground_truth` or `metadata.expected_answer`: a number, LaTeX with or without
    delimiters, or words. The reward is 0 if a response has no answer, an answer that cannot be parsed, or one whose
    comparison takes more than `cpuSeconds` of CPU time (`metadata.grading` is `limit` then): these are the policy's
    mistakes. A ground truth that cannot be parsed is the dataset's mistake, and a failure; so is an algebra process
    that does not work, which says nothing about the answer.
    """

    row_metadata: ClassVar[Mapping[str, str]] = {
        "ground_truth": "or expected_answer: the right answer, as a number, LaTeX or words",
        "solution": "for kuberoll certify, a worked solution that ends with the answer",
    }
    scoring_cases: ClassVar[Sequence[ScoringCase]] = [
        ScoringCase(row={"metadata": {"ground_truth": truth}}, responses=[response], reward=reward)
        for truth, response, reward in [
            ("1/3", r"So it is \boxed{\frac{2}{6}}.", 1.0),
            ("1/3", r"\boxed{0.333}", 0.0),
            ("1/3", r"\boxed{3}", 0.0),
            ("72", "48 + 24 = 72\n#### 72", 1.0),
            ("72", "48 + 24 = 71\n#### 71", 0.0),
            ("72", r"\boxed{72} or \boxed{71}", 0.0),
            ("72", r"It is \boxed{71} or \boxed{73}.", 0.0),
            ("72", "", 0.0),
            (r"(1, 2)", r"\boxed{(1, 2)}", 1.0),
            (r"(1, 2)", r"\boxed{(2, 1)}", 0.0),
            ("x^2 + 2x + 1", r"\boxed{(x + 1)^2}", 1.0),
            ("x^2 + 2x + 1", r"\boxed{x^2 + 1}", 0.0),
            ("Paris", "The answer is Paris.", 1.0),
            ("Paris", "The answer is Rome.", 0.0),
        ]
    ]

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(MathAnswersConfig, config)
        self._algebra = AlgebraProcess(cpu_seconds=self._config.cpu_seconds)
        self._truth = functools.lru_cache(maxsize=4096)(functools.partial(_read_truth, self._algebra))

    def check_row(self, metadata: Metadata) -> None:
        """Check that the ground truth is one answer; whether its LaTeX is mathematics is seen when it is compared.

        Raises:
            UnusableRow: The row has no valid ground truth.
        """
        state = metadata or {}
        text = _ground_truth(state)
        if _stated_value(text) is None:
            raise UnusableRow(f"{_row_name(state)}metadata.ground_truth: {text[:80]!r} {_NOT_ONE_ANSWER}")

    def turn(self, reply: Reply, state: dict[str, Any]) -> Turn:
        """See `TurnEnvironment.turn`."""
        text = _ground_truth(state)
        truth = self._truth(text)
        if isinstance(truth, str):
            raise UnusableRow(f"{_row_name(state)}metadata.ground_truth: {text[:80]!r} {truth}")
        answers = final_answers(reply[-self._config.max_characters :], truncated=reply.truncated)
        try:
            correct = bool(answers) and all(is_right(truth, answer, self._algebra) for answer in answers)
        except LimitExceeded:
            correct, state = False, {**state, "grading": "limit"}
        return grade(correct, state, answers[-1] if answers else None)

    def solution(self, episode: Episode) -> dict[str, list[str]]:
        """The ground truth in a box, and the row's worked solution, if it states an answer: the two must agree.

        It is tried as it stands: one with several answers that differ would be worth nothing as a response.
        """
        state = episode.metadata or {}
        found = {"the ground truth": [f"\\boxed{{{_bare_truth(_ground_truth(state))}}}"]}
        for number, text in enumerate(given_solutions(state), start=1):
            if _SENTENCE.search(text) and final_answers(text):
                found["the row's solution" + (f" {number}" if number > 1 else "")] = [text]
        return found

    def attacks(self, episode: Episode) -> dict[str, list[str]]:
        """Answers that a careless reader of boxes accepts: several, none of them, and ones that are taken back."""
        truth = _bare_truth(_ground_truth(episode.metadata or {}))
        if _WRONG in truth:
            return {}
        many = " ".join(f"\\boxed{{{number}}}" for number in range(-20, 101))
        return {
            "a wrong answer": [f"\\boxed{{{_WRONG}}}"],
            "an empty box": ["The answer is \\boxed{}."],
            "boxed numbers": [f"{many} \\boxed{{{_WRONG}}}"],
            "right and wrong boxed": [f"\\boxed{{{truth}}} or \\boxed{{{_WRONG}}}"],
            "wrong and right boxed": [f"\\boxed{{{_WRONG}}} and then \\boxed{{{truth}}}"],
            "right or wrong in one box": [f"\\boxed{{{truth} \\text{{ or }} {_WRONG}}}"],
            "right, taken back": [f"The answer is {truth}. Wait, it is {_WRONG}."],
        }

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with small problems, alternating between arithmetic, fractions and linear equations."""
        draw = random.Random(seed)
        makers = (_arithmetic, _fractions, _linear)
        problems = (makers[index % len(makers)](self._config.max_number, draw) for index in range(count))
        return [_row(index, question, truth) for index, (question, truth) in enumerate(problems)]


def is_right(truth: Value, answer: str, algebra: AlgebraProcess) -> bool:
    """True if a final answer, as text, states the value of the ground truth.

    Raises:
        LimitExceeded: The comparison exceeds its limits.
        ProcessFailed: The algebra process does not work.
    """
    value = read_value(answer)

    def compare(question: str, ours: str, theirs: str) -> bool:
        if is_explosive(theirs):
            raise LimitExceeded(question)
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


_WRONG = "987654321"


def _bare_truth(text: str) -> str:
    """A ground truth without the sentence or the delimiters around it."""
    stated = final_answers(text) if _SENTENCE.search(text) else [text]
    bare = (stated[0] if len(stated) == 1 else text).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = bare[len(opening) : -len(closing)]
        if bare.startswith(opening) and bare.endswith(closing) and opening not in inner and inner.strip():
            return inner.strip()
    return bare


_NOT_ONE_ANSWER = "cannot be read as one answer: write it as a number, as LaTeX or in words"
_SENTENCE = re.compile(r"\\(?:boxed|fbox)\s*\{|####|\banswer\b\s*(?:is|:|=)", re.IGNORECASE)


def _read_truth(algebra: AlgebraProcess, text: str) -> Value | str:
    """The value of a ground truth, or a message if it is invalid."""
    value = _stated_value(text)
    if value is None:
        return _NOT_ONE_ANSWER
    try:
        unreadable = next((part for part in _expressions(value) if algebra.ask("readable", part, "") is False), None)
    except LimitExceeded:
        return "takes longer to read than config.cpuSeconds; write it in a simpler form"
    if unreadable is not None:
        return f"has a part that cannot be read as mathematics: {unreadable[:80]!r}"
    return value


def _stated_value(text: str) -> Value | None:
    """The value of the one answer that a ground truth states, itself or at its end; None if it states none."""
    stated = final_answers(text) if _SENTENCE.search(text) else [text]
    return read_value(stated[0]) if len(stated) == 1 else None


def _expressions(value: Value) -> list[str]:
    """All pieces of LaTeX in a value."""
    if isinstance(value, Expression):
        return [] if DOTS in value.latex else [value.latex]
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
