"""Generated programming tasks: small functions, with their tests and solutions."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple


class Task(NamedTuple):
    """A kind of task.

    Attributes:
        text: What the function does with its argument `numbers`; `{n}` is a number of each row.
        solution: Body of a right function.
    """

    text: str
    solution: str


TASKS = (
    Task("the sum of the numbers that are divisible by {n}", "return sum(x for x in numbers if x % {n} == 0)"),
    Task("the numbers in ascending order, each multiplied by {n}", "return sorted(x * {n} for x in numbers)"),
    Task("how many of the numbers are greater than {n}", "return sum(x > {n} for x in numbers)"),
    Task("the list of the numbers without those equal to {n}", "return [x for x in numbers if x != {n}]"),
    Task("the list rotated to the left by {n} places", "k = {n} % len(numbers); return numbers[k:] + numbers[:k]"),
    Task("the largest difference between two of the numbers, plus {n}", "return max(numbers) - min(numbers) + {n}"),
)
_TESTS = 5


def solution_of(task: int, number: int) -> str:
    """A right program."""
    return f"def solve(numbers):\n    {TASKS[task].solution.format(n=number)}\n"


def generated_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of tasks; a longer dataset starts with the shorter one."""
    draw = random.Random(seed)
    return [_row(index, draw) for index in range(count)]


def _row(index: int, draw: random.Random) -> dict[str, Any]:
    kind, number = index % len(TASKS), draw.randint(2, 5)
    results: list[Any] = []
    others: list[list[Any]] = [results]
    lists: list[list[int]] = []
    # The tests must tell the number from the next ones, and a result from the list itself.
    while any(results == other for other in (*others, lists)):
        lists = [[draw.randint(-9, 9) for _ in range(draw.randint(1, 8))] for _ in range(_TESTS)]
        results, *others = ([_solve(kind, guess, numbers) for numbers in lists] for guess in _guesses(number))
    prompt = (
        f"Write a function `solve(numbers)` in Python. It returns {TASKS[kind].text.format(n=number)}.\n"
        f"For example, solve({lists[0]}) is {results[0]}.\nAnswer with a block of code that begins with ```python.\n"
    )
    tests = {"fn_name": "solve", "inputs": [[numbers] for numbers in lists], "outputs": results}
    return {
        "messages": [{"role": "user", "content": prompt}],
        "metadata": {"tests": json.dumps(tests), "task": kind, "number": number},
        "idx": index,
    }


def _guesses(number: int) -> tuple[int, ...]:
    return (number, number - 1, number + 1)


def _solve(kind: int, number: int, numbers: list[int]) -> Any:
    scope: dict[str, Any] = {}
    exec(solution_of(kind, number), scope)
    return scope["solve"](list(numbers))
