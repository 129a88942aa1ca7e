"""Comparison of an answer's value with the ground truth's value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from kuberoll_workers.environments.builtin.math.values import (
    DOTS,
    Assignment,
    Based,
    Chain,
    Dots,
    Expression,
    Group,
    Number,
    Quantity,
    Ratio,
    Relation,
    Text,
    Union,
    Value,
    read_value,
)

Algebra = Callable[[str, str, str], bool]
"""`(question, truth, answer)` -> True if the answer to the question is yes; `question` is a key of `algebra.QUESTIONS`.
"""

MIN_DIGITS = 6
"""Minimum number of significant digits with which a decimal can stand for a rounded value."""

_MAX_TERMS = 1000


def equal_values(truth: Value, answer: Value, algebra: Algebra) -> bool:
    """True if an answer is right. Not symmetric: the ground truth determines the form that was asked for.

    Raises:
        Exception: Any exception of `algebra`.
    """
    return _Comparison(algebra).equal(truth, answer)


class _Comparison:
    def __init__(self, algebra: Algebra) -> None:
        self._algebra = algebra

    def equal(self, truth: Value, answer: Value) -> bool:
        if truth == answer:
            return not isinstance(truth, Chain)
        if isinstance(truth, Chain | Dots) or isinstance(answer, Dots):
            return False
        if isinstance(answer, Chain):
            return self._chain(truth, answer)
        if isinstance(truth, Relation) or isinstance(answer, Relation):
            return self._relations(truth, answer)
        if isinstance(truth, Assignment) or isinstance(answer, Assignment):
            return self._assignments(truth, answer)
        if isinstance(truth, Group | Union) or isinstance(answer, Group | Union):
            return self._collections(truth, answer)
        if isinstance(truth, Text) or isinstance(answer, Text):
            return _words_of(truth) == _words_of(answer) is not None
        if isinstance(truth, Based) or isinstance(answer, Based):
            return False
        if isinstance(truth, Ratio) or isinstance(answer, Ratio):
            return (
                isinstance(truth, Ratio)
                and isinstance(answer, Ratio)
                and (not truth.suffix or not answer.suffix or truth.suffix == answer.suffix)
                and self._in_order(truth.parts, answer.parts)
            )
        return self._quantities(truth, answer)

    def _chain(self, truth: Value, answer: Chain) -> bool:
        """True for `2 + 3 = 5` and 5, if the equation holds."""
        last = answer.parts[-1]
        if not all(self._algebra("equal", last, part) for part in answer.parts[:-1]):
            return False
        value = read_value(last)
        return value is not None and not isinstance(value, Chain) and self.equal(truth, value)

    def _relations(self, truth: Value, answer: Value) -> bool:
        left, right = _relation_of(truth), _relation_of(answer)
        if left is None or right is None or left.operator != right.operator:
            return False
        question = {"=": "equation", "\\ne": "equation"}.get(left.operator, "inequality")
        return self._algebra(question, f"{left.left} - ({left.right})", f"{right.left} - ({right.right})")

    def _assignments(self, truth: Value, answer: Value) -> bool:
        if isinstance(truth, Assignment) and isinstance(answer, Assignment):
            if truth.name == answer.name:
                return self.equal(truth.value, answer.value)
            return self._relations(truth, answer) if _in_variables(truth, answer) else False
        if isinstance(truth, Assignment):
            return self.equal(truth.value, answer)
        assert isinstance(answer, Assignment)
        # x = 5 answers "what is x?"; it is not a point, set or interval.
        return self.equal(truth, answer.value)

    def _collections(self, truth: Value, answer: Value) -> bool:
        if isinstance(truth, Union) or isinstance(answer, Union):
            return (
                isinstance(truth, Union)
                and isinstance(answer, Union)
                and _same_variable(truth.variable, answer.variable)
                and self._in_any_order(truth.parts, answer.parts)
            )
        # A value stands for the set of this one value.
        if not isinstance(truth, Group):
            return isinstance(answer, Group) and self._single(answer, truth, flipped=True)
        if not isinstance(answer, Group):
            return self._single(truth, answer, flipped=False)
        if not _same_variable(truth.variable, answer.variable):
            return False
        kinds = {truth.kind, answer.kind}
        truth, answer = spelled_out(truth), spelled_out(answer)
        if kinds <= {"list", "set"} and any(isinstance(item, Dots) for item in (*truth.items, *answer.items)):
            return self._in_order(truth.items, answer.items)
        if kinds == {"tuple"}:
            return (truth.opening, truth.closing) == (answer.opening, answer.closing) and self._in_order(
                truth.items, answer.items
            )
        if kinds <= {"list", "set"}:
            return self._in_any_order(truth.items, answer.items)
        if kinds == {"list", "tuple"}:
            return self._unbracketed(truth, answer)
        return False

    def _single(self, group: Group, value: Value, *, flipped: bool) -> bool:
        if group.kind != "set" or len(group.items) != 1:
            return False
        return self.equal(value, group.items[0]) if flipped else self.equal(group.items[0], value)

    def _unbracketed(self, truth: Group, answer: Group) -> bool:
        """Compare a point with one written without round brackets: in order, or by the names of its coordinates."""
        point, written = (truth, answer) if truth.kind == "tuple" else (answer, truth)
        if (point.opening, point.closing) != ("(", ")") or point.variable:
            return False
        items: Sequence[Value] = written.items
        if all(isinstance(item, Assignment) for item in items):
            named = sorted((item for item in items if isinstance(item, Assignment)), key=lambda item: item.name)
            if len({item.name for item in named}) < len(named):
                return False
            items = [item.value for item in named]
        pairs = (point.items, items) if point is truth else (items, point.items)
        return self._in_order(*pairs)

    def _in_order(self, truths: Sequence[Value], answers: Sequence[Value]) -> bool:
        return len(truths) == len(answers) and all(map(self.equal, truths, answers))

    def _in_any_order(self, truths: Sequence[Value], answers: Sequence[Value]) -> bool:
        if len(truths) != len(answers):
            return False
        left = list(answers)
        for truth in truths:
            # Equal texts need no algebra.
            match = next((item for item in left if item == truth), None)
            if match is None:
                match = next((item for item in left if self.equal(truth, item)), None)
            if match is None:
                return False
            left.remove(match)
        return True

    def _quantities(self, truth: Value, answer: Value) -> bool:
        assert isinstance(truth, Number | Expression | Quantity)
        assert isinstance(answer, Number | Expression | Quantity)
        ours, theirs = _unit_of(truth), _unit_of(answer)
        value, other = _value_of(truth), _value_of(answer)
        if ours == theirs:
            return self._scalars(value, other)
        if ours and theirs:
            return False
        if "%" in (ours, theirs):
            return self._percent(value, other, of_truth=bool(ours))
        if self._scalars(value, other):
            return not ("degree" in (ours, theirs) and _has_pi(value if theirs else other))
        if "degree" not in (ours, theirs):
            return False
        # The same angle in radians, if it is a multiple of pi.
        if ours:
            return _has_pi(other) and self._scalars(_radians(value), other)
        return _has_pi(value) and self._scalars(value, _radians(other))

    def _percent(self, value: _Scalar, other: _Scalar, *, of_truth: bool) -> bool:
        if of_truth:
            return self._scalars(value, other) or self._scalars(_hundredth(value), other)
        # A ground truth such as 50 may have lost its percent sign; 0.5 is a fraction, not half a percent.
        dropped = not isinstance(value, Number) or abs(value.value) > 1
        return (dropped and self._scalars(value, other)) or self._scalars(value, _hundredth(other))

    def _scalars(self, truth: _Scalar, answer: _Scalar) -> bool:
        if truth == answer:
            return True
        if isinstance(truth, Number) and isinstance(answer, Number):
            return equal_numbers(truth, answer)
        if isinstance(truth, Number):
            return self._number_and_expression(truth, answer)
        if isinstance(answer, Number):
            return self._number_and_expression(answer, truth)
        if len(truth.latex) == len(answer.latex) == 1 or DOTS in truth.latex + answer.latex:
            return False
        return self._algebra("equal", truth.latex, answer.latex)

    def _number_and_expression(self, number: Number, expression: _Scalar) -> bool:
        assert isinstance(expression, Expression)
        if DOTS in expression.latex:
            return False
        if number.places and number.digits >= MIN_DIGITS:
            return self._algebra("decimal", f"{number.value} {number.places}", expression.latex)
        return self._algebra("number", str(number.value), expression.latex)


_Scalar = Number | Expression


def spelled_out(group: Group) -> Group:
    """An arithmetic progression with an ellipsis as its terms: `1, 3, …, 9` is 1, 3, 5, 7, 9.

    If its end is no number, or missing, two terms stand before the ellipsis. Other groups are returned as they are:
    after one term, or after terms of another kind, an ellipsis may stand for anything.
    """
    places = [place for place, item in enumerate(group.items) if isinstance(item, Dots)]
    if len(places) != 1 or places[0] < 2 or len(group.items) > places[0] + 2:
        return group
    terms = [item.value for item in group.items[: places[0]] if isinstance(item, Number)]
    step = terms[1] - terms[0] if len(terms) == places[0] else Fraction(0)
    if not step or any(after - before != step for before, after in pairwise(terms)):
        return group
    end = group.items[places[0] + 1 :]
    if end and isinstance(end[0], Number):
        count = (end[0].value - terms[0]) / step
        if count.denominator != 1 or not len(terms) <= count <= _MAX_TERMS:
            return group
        return replace(group, items=tuple(Number(terms[0] + step * number) for number in range(int(count) + 1)))
    return replace(group, items=(Number(terms[0]), Number(terms[1]), Dots(), *end))


def equal_numbers(truth: Number, answer: Number) -> bool:
    """True if two numbers are equal, or one is the other, rounded or truncated after at least six digits."""
    if truth.value == answer.value:
        return True
    return _stands_for(truth, answer) or _stands_for(answer, truth)


def _stands_for(decimal: Number, exact: Number) -> bool:
    if not decimal.places or decimal.digits < MIN_DIGITS or (exact.places or decimal.places + 1) <= decimal.places:
        return False
    if exact.places is None and _terminates(exact.value, decimal.places):
        return False
    return decimal.value in (rounded(exact.value, decimal.places), cut_off(exact.value, decimal.places))


def _terminates(value: Fraction, places: int) -> bool:
    return bool((value * 10**places).denominator == 1)


def rounded(value: Fraction, places: int) -> Fraction:
    """A value rounded to this many places, halves away from zero."""
    scaled = abs(value) * 10**places + Fraction(1, 2)
    return Fraction(scaled.numerator // scaled.denominator, 10**places) * (-1 if value < 0 else 1)


def cut_off(value: Fraction, places: int) -> Fraction:
    """A value truncated to this many places."""
    scaled = abs(value) * 10**places
    return Fraction(scaled.numerator // scaled.denominator, 10**places) * (-1 if value < 0 else 1)


def _unit_of(value: Value) -> str:
    return value.unit if isinstance(value, Quantity) else ""


def _value_of(value: Number | Expression | Quantity) -> _Scalar:
    return value.value if isinstance(value, Quantity) else value


def _hundredth(value: _Scalar) -> _Scalar:
    if isinstance(value, Number):
        return Number(value.value / 100)
    return Expression(f"\\frac{{{value.latex}}}{{100}}")


def _radians(value: _Scalar) -> _Scalar:
    degrees = f"({value.value.numerator})/({value.value.denominator})" if isinstance(value, Number) else value.latex
    return Expression(f"({degrees}) \\cdot \\frac{{\\pi}}{{180}}")


def _has_pi(value: _Scalar) -> bool:
    return isinstance(value, Expression) and "\\pi" in value.latex


def _same_variable(truth: str | None, answer: str | None) -> bool:
    return truth is None or answer is None or truth == answer


def _words_of(value: Value) -> str | None:
    if isinstance(value, Text):
        return value.words if len(value.words) > 1 else value.words.upper()
    # A single letter may be a choice or a variable.
    return value.latex if isinstance(value, Expression) and len(value.latex) == 1 else None


def _relation_of(value: Value) -> Relation | None:
    if isinstance(value, Relation):
        return value
    if isinstance(value, Assignment) and isinstance(value.value, Number | Expression):
        right = value.value
        return Relation("=", value.name, f"{right.value}" if isinstance(right, Number) else right.latex)
    return None


def _in_variables(truth: Assignment, answer: Assignment) -> bool:
    """True if two assignments may be the same equation, solved for different variables."""
    return isinstance(truth.value, Expression) and isinstance(answer.value, Expression)
