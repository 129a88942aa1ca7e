"""Sandboxes in the report: how long their starts take, how many there are at a time, and what became of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.analysis.report.sandboxes import SandboxTimes, most_at_once
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.sandbox_uses import uses_of
from tests.analysis.report.runs import report_of, trajectory


def use(asked: float, start: float, seconds: float, *, left: bool = False) -> dict[str, Any]:
    return {"asked": asked, "start_seconds": start, "seconds": seconds, "left": left}


def played(task: int, *uses: dict[str, Any], lost: int = 0, environment: str = "harbor") -> TrajectoryRecord:
    record = trajectory(task, environment=environment)
    record.metadata = {"result": {"rewards": {"reward": 1.0}, "sandboxes": list(uses), "sandboxes_lost": lost}}
    return record


@given(
    intervals=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 30)).map(lambda pair: (pair[0], sum(pair))), max_size=30
    )
)
def test_at_most_at_a_time_is_what_counting_finds(intervals: list[tuple[int, int]]) -> None:
    began, ended = np.array(intervals, dtype=np.float64).reshape(-1, 2).T
    assert most_at_once(began, ended) == max(
        (sum(low <= moment < high for low, high in intervals) for moment in range(61)), default=0
    )


def test_what_other_environments_keep_is_none_of_theirs() -> None:
    for metadata in (
        None,
        {},
        {"result": 4},
        {"result": {"score": 1}},
        {"result": {"sandboxes": 3}},
        {"result": {"sandboxes": [{"asked": "now"}]}},
    ):
        assert uses_of(metadata) is None
    times = SandboxTimes()
    times.add(trajectory(1))
    assert times.of(["puzzle"]) is None


def test_numbers_of_each_environment_and_of_all() -> None:
    records = [
        # The second one was there before the first one ended; a verifier had one of its own after that.
        played(0, use(100.0, 1.0, 10.0)),
        played(1, use(100.0, 3.0, 5.0), use(108.0, 2.0, 5.0, left=True), lost=2),
        played(2, use(104.0, 0.5, 10.0), environment="other"),
        trajectory(3, environment="puzzle"),
    ]
    numbers = report_of(records).numbers
    harbor, other, puzzle = (item["sandboxes"] for item in numbers["environments"])
    assert (harbor["most"], harbor["lost"], harbor["left"], harbor["starts"]["count"]) == (2, 2, 1, 3)
    assert (harbor["starts"]["median"], harbor["starts"]["p95"]) == (2.0, 3.0)
    assert (other["most"], other["lost"], other["left"]) == (1, 0, 0)
    assert puzzle is None
    assert (numbers["all"]["sandboxes"]["most"], numbers["all"]["sandboxes"]["starts"]["count"]) == (3, 4)


@pytest.mark.parametrize("at", [0.0, 1.79e9])
def test_a_sandbox_that_begins_when_another_ends_is_not_beside_it(at: float) -> None:
    times = SandboxTimes()
    times.add(played(0, use(at, 0.5, 4.0), use(at + 4.5, 0.0, 3.0)))
    found = times.of(["harbor"])
    assert found is not None
    assert found.most == 1
