"""Pocket calculator for a policy: one operation on two decimal numbers, exact and bounded."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

OPERATORS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
MAX_CHARACTERS = 64
LARGEST = 10**15

# ASCII digits only: `\d` matches the digits of all scripts.
_NUMBER = r"[-+]?[0-9]+(?:\.[0-9]+)?"
_NUMBER_ALONE = re.compile(rf"\s*({_NUMBER})\s*")
_OPERATION = re.compile(rf"\s*({_NUMBER})\s*([-+*/])\s*({_NUMBER})\s*")


class CalculationError(ValueError):
    """The expression cannot be calculated; the message is shown to the policy."""


def evaluate(expression: str) -> Fraction:
    """The value of `a + b`, `a - b`, `a * b` or `a / b`.

    Raises:
        CalculationError: The expression has another form, divides by 0, or has a number beyond 10^15.
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculationError(f"at most {MAX_CHARACTERS} characters can be calculated")
    matched = _OPERATION.fullmatch(expression)
    if matched is None:
        raise CalculationError("write one operation on two numbers, as in 7 + 6; the operations are + - * /")
    left, right = Fraction(matched[1]), Fraction(matched[3])
    if matched[2] == "/" and right == 0:
        raise CalculationError("division by zero")
    result = OPERATORS[matched[2]](left, right)
    if max(abs(left), abs(right), abs(result)) > LARGEST:
        raise CalculationError("a number is too large")
    return result


def parse_number(text: str) -> Fraction | None:
    """The number that a text consists of; None for other texts."""
    matched = _NUMBER_ALONE.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
    return Fraction(matched[1]) if matched else None


def render_number(value: Fraction) -> str:
    """Decimal text of a number: whole numbers without a point, others rounded to 6 decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    text = f"{float(value):.6f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def same_number(one: Fraction, other: Fraction) -> bool:
    """True if two numbers are equal up to 6 rendered decimals."""
    return abs(one - other) <= Fraction(1, 10**6)
