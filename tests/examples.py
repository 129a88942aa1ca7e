"""How many examples property tests try."""

from __future__ import annotations

from hypothesis import settings

QUICK_EXAMPLES = 10
"""Examples of a property test under `--quick`, where it asks for no number of its own; 100 otherwise."""


def examples(count: int) -> int:
    """A test's own number of examples; in proportion fewer, 5 at least, under `--quick`."""
    usual = settings().max_examples
    return max(5, count * min(100, usual) // 100)
