"""Durations in the summary of a run."""

from __future__ import annotations

import pytest

from kuberoll_workers.analysis.report.distance import Distance, distance_text
from kuberoll_workers.data.text import duration


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00004, "0.0 ms"), (0.0123, "12.3 ms"), (0.9996, "1.0 s"), (56.1374, "56.1 s")]
)
def test_milliseconds_below_a_second(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_short_run_says_what_it_lost_too() -> None:
    found = Distance(
        seconds=0.11,
        work_seconds=0.04,
        longest_seconds=0.04,
        tail_seconds=0.03,
        environment_seconds=0.039,
        other_seconds=0.001,
    )
    text = "schedule: 110.0 ms, 2.75 × the bound: at full speed 40.0 ms, the longest trajectory 40.0 ms; lost: "
    assert distance_text(found) == text + "tail 30.0 ms, environments 39.0 ms"
