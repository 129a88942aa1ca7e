"""Comparison of what a program printed with what it should print."""

from __future__ import annotations

import math


def same_output(printed: str, expected: str, *, tolerance: float) -> bool:
    """True if two outputs have the same lines of the same words.

    White space between words, at the ends of lines and at the end of the output does not count. Two words are the same
    if they are equal, or if the expected one is a number with a decimal point or an exponent and the other one is a
    number that differs from it by no more than the tolerance, absolute or relative.
    """
    theirs, ours = _lines(printed), _lines(expected)
    return len(theirs) == len(ours) and all(
        len(words) == len(wanted)
        and all(_same_word(word, want, tolerance) for word, want in zip(words, wanted, strict=True))
        for words, wanted in zip(theirs, ours, strict=True)
    )


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().splitlines()]


def _same_word(word: str, wanted: str, tolerance: float) -> bool:
    if word == wanted:
        return True
    if not any(mark in wanted for mark in ".eE"):
        return False
    number, goal = _number(word), _number(wanted)
    return number is not None and goal is not None and math.isclose(number, goal, rel_tol=tolerance, abs_tol=tolerance)


def _number(word: str) -> float | None:
    # Python would also read underscores, other alphabets' digits, "nan" and "infinity".
    if len(word) > 400 or not word.isascii() or word.strip("+-.0123456789eE") or not any(c.isdigit() for c in word):
        return None
    try:
        found = float(word)
    except ValueError:
        return None
    return found if math.isfinite(found) else None
