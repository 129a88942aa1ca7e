"""Solutions that rows of the built-in environments have, for `kuberoll certify`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SOLUTION_KEYS: Final = (
    "solution", "solutions", "canonical_solution", "reference_solution", "gold_standard_solution", "completion",
)  # fmt: skip
"""Fields of the metadata with whole solutions, as known datasets have them."""

_MOST: Final = 3


def given_solutions(state: Mapping[str, Any]) -> list[str]:
    """The texts of the row's solutions, a few at most; empty if it has none."""
    found: list[str] = []
    for key in SOLUTION_KEYS:
        value = state.get(key)
        texts = value if isinstance(value, list) else [value]
        found += [text for text in texts if isinstance(text, str) and text.strip()]
    return list(dict.fromkeys(found))[:_MOST]
