"""Throughput over time: every turn and token of the run is in it, when it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.analysis.report import throughput
from kuberoll_workers.analysis.report.throughput import Stretch, Throughput
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import TrajectoryRecord
from tests.analysis.report.runs import trajectory

START = 1_790_000_000.0

Turn = tuple[float, float, float, int]
"""End in seconds after the start, seconds of generation and of the environment, tokens."""


def played(turns: list[Turn], *, environment: str = "puzzle", task: int = 0) -> TrajectoryRecord:
    messages = [Message("user", "hi", token_array([1]))]
    for number, (_, _, _, tokens) in enumerate(turns, start=1):
        messages.append(Message("assistant", "x", token_array(range(tokens)), turn=number, sampled=True))
        messages.append(Message("environment", "y", token_array([1] * 3), turn=number))
    record = trajectory(
        task, environment=environment, messages=messages, rewards=[0.0] * len(turns),
        seconds=[(generation, stepping) for _, generation, stepping, _ in turns],
    )  # fmt: skip
    record.timing.ended_at = [START + end for end, _, _, _ in turns]
    return record


def of(*records: TrajectoryRecord, names: tuple[str, ...] = ("puzzle",)) -> list[Stretch]:
    collected = Throughput()
    for record in records:
        collected.add(record)
    return collected.stretches(names)


def widths(stretch: Stretch) -> Any:
    bounds = np.append(np.arange(stretch.start, stretch.end, stretch.seconds), stretch.end)
    return np.diff(bounds)


def totals(stretches: list[Stretch]) -> tuple[float, float, float]:
    """Turns, tokens, and trajectory seconds."""
    turns, tokens, busy = (
        sum(float(np.sum(getattr(stretch, name) * widths(stretch))) for stretch in stretches)
        for name in ("turns", "tokens", "busy")
    )
    return turns, tokens, busy


def test_tokens_count_while_they_are_generated_and_turns_at_their_end() -> None:
    # 8 tokens in the first two seconds; the environment takes the third one.
    (found,) = of(played([(3.0, 2.0, 1.0, 8)]))
    assert (found.start, round(found.end - START, 1)) == (START, 3.0)
    places = (START + np.arange(len(found.tokens)) * found.seconds + found.seconds / 2) - START
    assert found.tokens == pytest.approx(np.where(places < 2.0, 4.0, 0.0))
    assert found.busy[places < 3.0] == pytest.approx(1.0)
    assert np.flatnonzero(found.turns).tolist() == [len(found.turns) - 1]
    assert totals([found]) == pytest.approx((1, 8, 3))


TURNS = st.lists(
    st.tuples(st.floats(0, 2000), st.floats(0.001, 60), st.floats(0, 60), st.integers(0, 500)), min_size=1, max_size=30
)


@given(TURNS, st.integers(8, 64), st.integers(2, 40))
def test_nothing_is_lost_however_long_the_run(turns: list[Turn], bins: int, points: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(throughput, "_MOST_BINS", bins)
        patched.setattr(throughput, "_MOST_POINTS", points + throughput._MOST_PAUSES)
        patched.setattr(throughput, "_BUFFER", 4)
        found = of(*(played([turn], task=number) for number, turn in enumerate(turns)))
    assert sum(len(stretch.turns) for stretch in found) <= points + throughput._MOST_PAUSES
    expected = (len(turns), sum(turn[3] for turn in turns), sum(turn[1] + turn[2] for turn in turns))
    assert totals(found) == pytest.approx(expected, rel=1e-6, abs=1e-3)
    assert all((getattr(stretch, name) >= 0).all() for stretch in found for name in ("turns", "tokens", "busy"))


def test_a_pause_between_an_interruption_and_its_resumption_is_left_out() -> None:
    first = [played([(float(second), 1.0, 0.0, 10)], task=second) for second in range(1, 31)]
    second = [played([(float(second), 1.0, 0.0, 10)], task=second) for second in range(90_001, 90_031)]
    before, after = of(*second, *first)
    assert (before.start, after.start) == (START, START + 90_000)
    assert before.tokens[:-1] == pytest.approx(10.0)
    assert totals([before, after]) == pytest.approx((60, 600, 60))


def test_short_waits_are_no_pauses() -> None:
    (found,) = of(*(played([(float(end), 1.0, 0.0, 10)], task=end) for end in range(2, 60, 2)))
    assert found.tokens.max() == pytest.approx(10.0)
    assert found.tokens.min() == 0.0


def test_environments_share_the_time_of_the_run() -> None:
    puzzle, maths = played([(4.0, 4.0, 0.0, 16)]), played([(8.0, 4.0, 0.0, 4)], environment="math", task=1)
    for names, tokens in ((("puzzle",), 16), (("math",), 4), (("puzzle", "math"), 20), (("other",), 0)):
        (found,) = of(puzzle, maths, names=names)
        assert (found.start, round(found.end - START, 1)) == (START, 8.0)
        assert totals([found])[1] == pytest.approx(tokens, abs=1e-6)


def test_times_that_are_unknown_are_left_out() -> None:
    old = played([(1.0, 1.0, 0.0, 5)])
    old.timing.ended_at = []
    assert of(old) == []
    half = played([(1.0, 1.0, 0.0, 5), (3.0, 1.0, 0.0, 7)])
    half.timing.ended_at[0] = None
    assert totals(of(half)) == pytest.approx((1, 7, 1))


def test_the_mean_is_over_all_environments_without_pauses() -> None:
    assert Throughput().tokens_per_second() is None
    collected = Throughput()
    # The last interval is shorter than the others.
    for task, start in enumerate((0, 90_000)):
        collected.add(played([(start + end, 1.0, 0.0, 10) for end in (1.0, 2.0, 3.0, 4.375)], task=2 * task))
        collected.add(played([(start + 4.0, 4.0, 0.0, 20)], environment="math", task=2 * task + 1))
    first, _ = collected.stretches(["puzzle", "math"])
    assert first.generated == pytest.approx(60)
    assert (first.end - first.start) % first.seconds != 0
    assert collected.tokens_per_second() == pytest.approx(2 * 60 / (2 * (first.end - first.start)))
