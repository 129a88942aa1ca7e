"""Durations in the summary of a run."""

from __future__ import annotations

import pytest

from kuberoll_workers.commands.console import duration


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00004, "0.0 ms"), (0.0123, "12.3 ms"), (0.9996, "1.0 s"), (56.1374, "56.1 s")]
)
def test_milliseconds_below_a_second(seconds: float, text: str) -> None:
    assert duration(seconds) == text
