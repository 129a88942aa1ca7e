"""The exit code of a run, and its reason."""

from __future__ import annotations

from typing import Any

import pytest

from kuberoll_workers.local.outcome import outcome
from kuberoll_workers.run_end import RunEnd

HINT = "of 10 trajectories are stored; continue with --resume --output runs/a"


@pytest.mark.parametrize(
    ("course", "code", "problem"),
    [
        ({}, 1, f"only 4 {HINT}"),
        ({"interrupted": True}, 130, f"interrupted: 4 {HINT}"),
        ({"problems": ["the engine has ended"]}, 1, f"the engine has ended\n4 {HINT}"),
        ({"problems": ["the engine has ended"], "interrupted": True}, 1, f"the engine has ended\n4 {HINT}"),
        ({"counted": 10}, 0, None),
        # The interrupt came too late to matter.
        ({"counted": 10, "interrupted": True}, 0, None),
    ],
)
def test_without_aggregates_the_counts_of_the_workers_decide(
    course: dict[str, Any], code: int, problem: str | None
) -> None:
    given = {
        "location": "runs/a", "failures": "runs/a/failures.jsonl", "max_failed_fraction": 0.0, "problems": [],
        "interrupted": False, "counted": 4, **course,
    }  # fmt: skip
    assert outcome(RunEnd(planned=10, wanted=None), **given) == (code, problem)
