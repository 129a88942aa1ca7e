"""Causes of a failure that a retry does not change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

LASTING: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    FileNotFoundError,
    ImportError,
    IsADirectoryError,
    LookupError,
    NotADirectoryError,
    NotImplementedError,
    PermissionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Types of exceptions that stay the same when the same code runs again; any other may be temporary."""


def is_lasting(error: BaseException, *further: type[BaseException]) -> bool:
    """True if an exception and all its causes are of lasting types.

    Args:
        further: Types that are lasting, too.
    """
    return all(isinstance(cause, (*LASTING, *further)) for cause in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
