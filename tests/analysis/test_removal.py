"""What was removed from a run, by turn and length, and what the tests say of it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kuberoll_workers.analysis.aggregation.aggregates import aggregate
from kuberoll_workers.analysis.removal import Lengths, Removal, Removed, adjust, removal_of
from kuberoll_workers.analysis.statistics import holm, stratified_ranks
from kuberoll_workers.data.record import TokenCounts
from kuberoll_workers.output.run_files import RunFiles
from tests.output import support
from tests.trainer.support import WrittenRun, trajectory

TASKS, SAMPLES = 40, 8


def compared(
    kept: Sequence[tuple[int, int, float]], lost: Sequence[tuple[int, int]], *, reason: str = "TrajectoryDeadline"
) -> Removal:
    """Of kept (task, turns, reward) and removed (task, turn) trajectories, each turn of 100 tokens."""
    tasks, turns, rewards = (np.array(column) for column in zip(*kept, strict=True))
    lengths = Lengths(tasks=tasks.astype(np.int64), turns=turns.astype(np.int64), tokens=100.0 * turns)
    removed = [
        Removed(task, reason, "operator", turn, 100 * max(0, turn - 1), reason == "stale") for task, turn in lost
    ]
    found = removal_of(lengths, rewards.astype(np.float64), removed)
    assert found is not None
    return adjust({"env": found})["env"]


def played() -> list[tuple[int, int, float]]:
    """Tasks of equal difficulty whose long samples are wrong: turns 1 to 8, rewards of 1 up to turn 4."""
    return [(task, 1 + sample, float(sample < 4)) for task in range(TASKS) for sample in range(SAMPLES)]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=2, max_size=9),
    st.randoms(use_true_random=False),
)
def test_the_rank_test_is_that_over_all_permutations(rows: list[tuple[int, int, bool]], chance: Any) -> None:
    strata, values, marked = (np.array(column) for column in zip(*rows, strict=True))
    found = stratified_ranks(strata, values.astype(float), marked)
    mean = variance = observed = 0.0
    for stratum in set(strata.tolist()):
        own = sorted(values[strata == stratum].tolist())
        ranks = {value: own.index(value) + (own.count(value) + 1) / 2 for value in own}
        chosen = [ranks[value] for value in values[(strata == stratum) & marked].tolist()]
        sums = [sum(some) for some in itertools.combinations([ranks[value] for value in own], len(chosen))]
        weight = 1 / (len(own) + 1)
        observed += weight * sum(chosen)
        mean += weight * float(np.mean(sums))
        variance += weight**2 * float(np.var(sums))
    if variance < 1e-12:
        assert found is None
        return
    assert found is not None
    assert found.z == pytest.approx((observed - mean) / math.sqrt(variance))
    # The order in which they are given says nothing.
    chance.shuffle(rows)
    strata, values, marked = (np.array(column) for column in zip(*rows, strict=True))
    again = stratified_ranks(strata, values.astype(float), marked)
    assert again is not None
    assert again.z == pytest.approx(found.z)


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_adjusts_upwards_and_keeps_the_order(chances: list[float]) -> None:
    found = holm(chances)
    assert all(chance <= adjusted <= 1 for chance, adjusted in zip(chances, found, strict=True))
    assert all(
        one <= other
        for a, one in zip(chances, found, strict=True)
        for b, other in zip(chances, found, strict=True)
        if a < b
    )
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_a_limit_that_removes_the_longest_is_found() -> None:
    kept = [row for row in played() if row[1] <= 6]
    found = compared(kept, [(task, 7) for task in range(TASKS) for _ in range(2)])
    assert found.verdict == "longer"
    assert found.adjusted["turns"] < 1e-6
    line = found.warning("env")
    assert line is not None
    assert "env: 80 of 320 trajectories were removed, and longer ones more often (p < 0.001)" in line
    assert "TrajectoryDeadline, which removes slow ones: raise timeouts.trajectorySeconds" in line
    assert found.turns[-1] == {"from": 5, "to": 8, "reached": 2 * TASKS + 80, "removed": 80}


def test_what_is_lost_before_the_first_response_shows_no_bias() -> None:
    kept = [row for number, row in enumerate(played()) if number % 9]
    found = compared(kept, [(row[0], 0) for number, row in enumerate(played()) if number % 9 == 0])
    assert (found.verdict, found.shift.mean, found.warning("env")) == ("none", 0.0, None)


def test_what_strikes_whoever_is_running_shifts_rewards_by_what_was_lost() -> None:
    # Of each task one of the six that reached turn 3, whose rewards are 0.
    kept = [(task, turns, float(turns < 3)) for task, turns, _ in played() if turns != 3 + task % 6]
    found = compared(kept, [(task, 3) for task in range(TASKS)])
    assert found.verdict == "exposed"
    # Two of seven that are kept are right, and were two of eight: each of the five stands for a fifth more.
    assert found.shift.mean == pytest.approx(2 / 7 - 2 / 8)
    line = found.warning("env")
    assert line is not None
    assert "the kept rewards of a prompt are off by +0.036" in line


def test_what_is_as_long_as_the_others_may_have_failed_at_its_end() -> None:
    lost = [(task, 1 + (3 * task) % 8) for task in range(TASKS)]
    kept = [row for row in played() if (row[0], row[1]) not in lost]
    found = compared(kept, lost)
    assert found.adjusted["shift"] < 0.05
    assert (found.verdict, found.warning("env")) == ("unclear", None)


@pytest.mark.parametrize("lost", [[(0, 7)] * 5, [(task, 1) for task in range(TASKS)]], ids=["few", "single turns"])
def test_too_little_to_tell(lost: list[tuple[int, int]]) -> None:
    kept = played() if len(lost) < TASKS else [(task, 1, reward) for task, _, reward in played()]
    found = compared(kept, lost)
    assert (found.verdict, found.warning("env")) == ("unclear", None)


def test_whole_groups_are_compared_with_others() -> None:
    found = compared(played(), [(TASKS + task, 6) for task in range(TASKS) for _ in range(2)], reason="stale")
    assert found.tests.keys() >= {"groups"}
    assert found.verdict == "longer"
    assert "onStale: Finish" in str(found.warning("env"))
    # Their turns say nothing of what a trajectory of such a length risks.
    assert (found.shift.mean, "shift" in found.tests) == (0.0, False)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=40
    ),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=20),
)
def test_everyone_is_counted_and_bounds_hold(kept: list[tuple[int, int, float]], lost: list[tuple[int, int]]) -> None:
    found = compared(kept, lost)
    assert sum(row["removed"] for row in found.turns) == sum(row["removed"] for row in found.tokens) == len(lost)
    assert found.turns[0]["reached"] == len(kept) + len(lost)
    reached = [row["reached"] for row in found.turns]
    assert reached == sorted(reached, reverse=True)
    assert found.lowest is not None
    assert found.highest is not None
    rewards = [reward for _, _, reward in kept]
    assert min(rewards) - 1e-9 <= found.lowest <= np.mean(rewards) + 1e-9
    assert np.mean(rewards) - 1e-9 <= found.highest <= max(rewards) + 1e-9
    assert all(0 <= chance <= 1 for chance in found.adjusted.values())


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6), st.sampled_from([0.0, 1.0])), min_size=4, max_size=60))
def test_a_shift_is_that_of_weights_by_hand(kept: list[tuple[int, int, float]]) -> None:
    assume(len({turns for _, turns, _ in kept}) > 1)
    lost = [(task, (turns + 1) // 2) for task, turns, _ in kept[::3]]
    found = compared(kept, lost)
    lengths = [turns for _, turns, _ in kept] + [turn for _, turn in lost]

    def chance(turns: int) -> float:
        """Of being kept as long as that."""
        return math.prod(
            1 - sum(turn == at for _, turn in lost) / sum(length >= at for length in lengths)
            for at in range(turns + 1)
            if any(length >= at for length in lengths)
        )

    shifts = []
    for task in {task for task, _, _ in kept}:
        own = [(reward, 1 / chance(turns)) for of, turns, reward in kept if of == task]
        if len(own) > 1:
            plain = sum(reward for reward, _ in own) / len(own)
            shifts.append(plain - sum(reward * weight for reward, weight in own) / sum(weight for _, weight in own))
    assert found.shift.runs == len(shifts)
    if shifts:
        assert found.shift.mean == pytest.approx(np.mean(shifts), abs=1e-9)


def test_it_is_in_the_aggregates(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, groups=2, repeats=4)
    run.write(
        *(trajectory(0, rollout, turn_count=3, tokens=TokenCounts(2, 300, 0)) for rollout in range(2)),
        support.failure(0, 2, turn_count=1, tokens=100, reason="PolicyLost"),
        support.failure(0, 3, turn_count=2, tokens=200, reason="SandboxLost", stage="environment"),
        support.dropped(1, 0, reason="filtered"),
        support.dropped(1, 1, reason="oversampled", turn_count=2, stop_reason=None),
    )
    found = json.loads(aggregate([RunFiles(str(run.path))]).encode())["environments"]["env"]["removal"]
    assert found["removed"] == 3
    assert found["share"] == pytest.approx(3 / 5)
    assert found["reasons"]["PolicyLost"] == {"kind": "infrastructure", "count": 1, "turns": 2.0, "tokens": 100.0}
    assert found["reasons"]["SandboxLost"]["turns"] == 2.0
    # It was stopped in its third turn.
    assert found["reasons"]["oversampled"]["turns"] == 3.0
    assert [row["removed"] for row in found["turns"]] == [0, 0, 2, 1]
    assert [row["reached"] for row in found["turns"]] == [5, 5, 5, 3]
    assert (found["verdict"], found["tests"]) == ("unclear", {})
    assert found["reward_if_all_kept"] == {"low": 1.0, "high": 1.0}
