"""Distance of a run from its bound: every second is work or lost, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.analysis.report.distance import Distance, distance
from kuberoll_workers.analysis.report.throughput import Throughput
from tests.analysis.report.test_throughput import Turn, played

BIN = 1 / 64
"""A run's end is known to the width of a bin."""


def of(*trajectories: list[Turn]) -> Distance:
    collected = Throughput()
    for task, turns in enumerate(trajectories):
        collected.add(played(turns, task=task))
    found = distance(collected)
    assert found is not None
    return found


def test_a_run_at_full_speed_to_its_end_is_at_its_bound() -> None:
    found = of(*([(8.0, 8.0, 0.0, 80)] for _ in range(4)))
    assert [found.seconds, found.work_seconds, found.longest_seconds] == pytest.approx([8.0] * 3, abs=BIN)
    assert found.over_bound == pytest.approx(1.0, abs=BIN)
    assert found.tail_seconds + found.environment_seconds + found.other_seconds <= BIN


def test_what_is_lost_to_the_last_trajectory_is_the_tail() -> None:
    # Four end after two seconds, the fifth after eight: three quarters of the time at a fifth of the speed.
    found = of(*([(2.0, 2.0, 0.0, 20)] for _ in range(4)), [(8.0, 8.0, 0.0, 80)])
    assert found.tail_seconds == pytest.approx(6.0 * 0.8, abs=BIN)
    assert found.work_seconds == pytest.approx(8.0 - 6.0 * 0.8, abs=BIN)
    # The longest trajectory alone is as long.
    assert found.over_bound == pytest.approx(1.0, abs=BIN)


def test_what_is_lost_while_all_wait_for_environments_is_theirs() -> None:
    turns = [(4.0, 2.0, 2.0, 20), (8.0, 2.0, 2.0, 20)]
    # A last one begins late, so that little is tail.
    found = of(turns, turns, [(8.0, 0.5, 0.0, 5)])
    assert found.environment_seconds == pytest.approx(3.0, abs=0.7)
    assert found.longest_seconds == 8.0


def test_a_slow_start_has_another_cause() -> None:
    found = of([(4.0, 4.0, 0.0, 40)], [(8.0, 4.0, 0.0, 40)], [(8.0, 4.0, 0.0, 40)])
    assert found.other_seconds == pytest.approx(2.0, abs=BIN)
    assert found.over_bound == pytest.approx(8 / 6, abs=BIN)


def test_a_pause_does_not_count() -> None:
    found = of([(2.0, 2.0, 0.0, 20)], [(1002.0, 2.0, 0.0, 20)])
    assert found.seconds == pytest.approx(4.0, abs=0.1)


def test_without_times_or_tokens_there_is_none() -> None:
    collected = Throughput()
    assert distance(collected) is None
    collected.add(played([(1.0, 1.0, 0.0, 0)]))
    assert distance(collected) is None


_turns = st.lists(
    st.tuples(st.floats(0.01, 5.0), st.floats(0.0, 5.0), st.integers(0, 50)), min_size=1, max_size=4
)  # generation, environment, tokens


@given(st.lists(st.tuples(st.floats(0.0, 20.0), _turns), min_size=1, max_size=12))
def test_every_second_is_work_or_lost_once(drawn: list[tuple[float, list[tuple[float, float, int]]]]) -> None:
    collected = Throughput()
    for task, (began, turns) in enumerate(drawn):
        now, made = began, []
        for generation, stepping, tokens in turns:
            now += generation + stepping
            made.append((now, generation, stepping, tokens))
        collected.add(played(made, task=task))
    found = distance(collected)
    if found is None:
        assert all(tokens == 0 for _, turns in drawn for *_, tokens in turns)
        return
    parts = (found.work_seconds, found.tail_seconds, found.environment_seconds, found.other_seconds)
    assert all(part >= -1e-9 for part in parts)
    assert sum(parts) == pytest.approx(found.seconds)
    assert found.over_bound >= 1.0
    assert found.longest_seconds == pytest.approx(
        max(sum(generation + stepping for generation, stepping, _ in turns) for _, turns in drawn)
    )
