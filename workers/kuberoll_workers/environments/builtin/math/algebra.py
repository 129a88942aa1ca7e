"""Equality of LaTeX expressions by sympy. Imported only by the algebra process (`math.process`)."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import sympy  # type: ignore[import-untyped]

from kuberoll_workers.environments.builtin.math.equality import cut_off, rounded

DIGITS = 60
_MOST_SYMBOLS = 5
_VALUES = 3
_PRIMES = (2, 11, 5, 17, 3, 13, 23, 19)
_ZERO = sympy.Float(f"1e-{DIGITS - 15}", DIGITS)


class Unreadable(Exception):
    """The text cannot be parsed as mathematics."""


def equal(truth: str, answer: str) -> bool:
    """True if two expressions are equal for all values of their variables."""
    return _equal(expression(truth), expression(answer))


def number(truth: str, answer: str) -> bool:
    """True if an expression equals a rational number, given as `3/4`."""
    return _equal(sympy.Rational(truth), expression(answer))


def decimal(truth: str, answer: str) -> bool:
    """True if a constant equals a decimal, exactly or rounded or truncated; the decimal is given as value, places."""
    value, _, places = truth.partition(" ")
    exact = Fraction(value)
    right = expression(answer)
    if _equal(sympy.Rational(value), right):
        return True
    if right.is_rational or not right.is_number:
        return False
    real, imaginary = right.evalf(DIGITS + int(places)).as_real_imag()
    if imaginary != 0 or not real.is_Float:
        return False
    written = Fraction(str(sympy.Rational(str(real))))
    return exact in (rounded(written, int(places)), cut_off(written, int(places)))


def equation(truth: str, answer: str) -> bool:
    """True if two differences vanish for the same values: one is a constant multiple of the other."""
    return _factor(truth, answer) is not None


def inequality(truth: str, answer: str) -> bool:
    """True if two differences are negative for the same values: one is a positive multiple of the other."""
    factor = _factor(truth, answer)
    return factor is not None and bool(factor.is_positive)


def readable(truth: str, _: str) -> bool:
    """True if the ground truth can be parsed as mathematics."""
    try:
        expression(truth)
    except Unreadable:
        return False
    return True


QUESTIONS = {question.__name__: question for question in (equal, number, decimal, equation, inequality, readable)}


def answer(question: Sequence[str]) -> bool | None:
    """Reply to the name of a question, a ground truth and an answer; None if one of the two is not mathematics."""
    name, truth, text = question
    try:
        return bool(QUESTIONS[name](truth, text))
    except Unreadable:
        return None
    except (MemoryError, RecursionError, OverflowError):
        raise
    except Exception:
        # sympy raises many kinds of errors for incomparable values.
        return False


def prepare() -> None:
    """Load what the first question would."""
    equal("\\frac{1}{2} x + \\sqrt{2}", "\\sqrt{2} + 0.5 x")


@functools.lru_cache(maxsize=256)
def expression(latex: str) -> Any:
    """The sympy expression of a piece of LaTeX.

    Raises:
        Unreadable: It cannot be parsed.
    """
    library = importlib.import_module("latex2sympy2_extended.latex2sympy2")
    # Units were parsed before; the h of pi r^2 h is not an hour, and x is not X.
    spelling = library.NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    letters = library.ConversionConfig(lowercase_symbols=False)
    try:
        parsed = library.latex2sympy(
            latex, is_real=True, convert_degrees=False, normalization_config=spelling, conversion_config=letters
        )
    except MemoryError:
        raise
    except Exception as error:
        # The parser, and sympy while building the expression, raise many kinds of errors.
        raise Unreadable(latex) from error
    if not isinstance(parsed, sympy.Basic | sympy.MatrixBase):
        raise Unreadable(latex)
    # The parser leaves i a symbol instead of the imaginary unit.
    units = {symbol: sympy.I for symbol in parsed.free_symbols if symbol.name == "i"}
    return parsed.subs(units) if units else parsed


def _equal(truth: Any, answer: Any) -> bool:
    if isinstance(truth, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
        return _matrices(truth, answer)
    if not (isinstance(truth, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return bool(truth == answer) or _by_library(truth, answer)
    if truth == answer:
        return True
    if truth.free_symbols != answer.free_symbols and not (truth.free_symbols and answer.free_symbols):
        # A variable may cancel out.
        truth, answer = sympy.simplify(truth), sympy.simplify(answer)
    if truth.is_infinite or answer.is_infinite:
        return bool(truth == answer)
    difference = truth - answer
    if difference.is_number:
        return _is_zero(difference)
    try:
        return difference.equals(0) is True or sympy.simplify(difference) == 0 or _equal_where_real(truth, answer)
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return False


def _equal_where_real(truth: Any, answer: Any) -> bool:
    r"""True if two expressions are equal wherever all their roots and logarithms are real.

    `\sqrt{1/n}` is `1/\sqrt{n}` for positive n, and elsewhere their roots are complex. `\sqrt{x^2}` is real everywhere,
    so it is not x.
    """
    symbols = sorted(truth.free_symbols, key=str)
    if not 0 < len(symbols) <= _MOST_SYMBOLS or answer.free_symbols != truth.free_symbols:
        return False
    parts = [part for side in (truth, answer) for part in sympy.preorder_traversal(side) if _may_be_complex(part)]
    if not parts:
        return False
    positive = {symbol: sympy.Dummy(symbol.name, positive=True) for symbol in symbols}
    difference = (truth - answer).xreplace(positive)
    if not (difference.equals(0) is True or sympy.simplify(difference) == 0):
        return False
    # Of each sign, some values.
    for signs in itertools.product((1, -1), repeat=len(symbols)):
        for shift in range(_VALUES):
            values = [
                sign * sympy.Rational(prime, 7 + 4 * shift) for sign, prime in zip(signs, _PRIMES[shift:], strict=False)
            ]
            at = dict(zip(symbols, values, strict=False))
            left, right, *others = (complex(side.xreplace(at).evalf(30)) for side in (truth, answer, *parts))
            real = all(abs(value.imag) <= 1e-12 * abs(value) for value in others)
            if real and abs(left - right) > 1e-9 * max(abs(left), abs(right)):
                return False
    return True


def _may_be_complex(part: Any) -> bool:
    if isinstance(part, sympy.log):
        return bool(part.free_symbols)
    return isinstance(part, sympy.Pow) and part.exp.is_integer is not True and bool(part.base.free_symbols)


def _is_zero(constant: Any) -> bool:
    """True if a constant is 0, as far as DIGITS digits show."""
    value = constant.doit()
    if value.is_Rational:
        return bool(value == 0)
    scale = max([abs(part.evalf(15)) for part in sympy.Add.make_args(value)], default=0)
    size = abs(value.evalf(DIGITS, maxn=4 * DIGITS))
    if not (size.is_comparable and sympy.sympify(scale).is_comparable):
        return bool(sympy.simplify(value) == 0)
    return bool(size <= _ZERO * scale)


def _matrices(truth: Any, answer: Any) -> bool:
    return (
        isinstance(truth, sympy.MatrixBase)
        and isinstance(answer, sympy.MatrixBase)
        and truth.shape == answer.shape
        and all(_equal(left, right) for left, right in zip(truth, answer, strict=True))
    )


def _by_library(truth: Any, answer: Any) -> bool:
    return bool(_math_verify().verify(truth, answer, timeout_seconds=None))


def _factor(truth: str, answer: str) -> Any | None:
    left, right = expression(truth), expression(answer)
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)) or left.free_symbols != right.free_symbols:
        return None
    if _equal(left, right):
        return sympy.Integer(1)
    if right == 0 or left == 0:
        return None
    ratio = sympy.simplify(left / right)
    return ratio if ratio.is_number and ratio != 0 and ratio.is_finite else None


@functools.cache
def _math_verify() -> Any:
    import math_verify

    # It warns that its timeouts are off. They need the main thread; this process has its own limits.
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    return math_verify
