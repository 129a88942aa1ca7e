"""Which result ends a prompt group: the one with which a consumer can use it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.record import TrajectoryKey
from kuberoll_workers.output.group_ends import GroupEnds
from kuberoll_workers.output.key_set import KeySet
from tests.output.support import dropped, failure, record

REPEATS = 3


def ends(*stored: tuple[int, int], oversample: int = 0) -> GroupEnds:
    keys = KeySet(TrajectoryKey(*key) for key in stored)
    return GroupEnds(repeats={"env": REPEATS}, oversample=oversample, stored=keys)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([record(0, 0), record(0, 1), record(0, 2)], [False, False, True]),
        # Of a task's second group.
        ([record(0, 3), record(0, 2), record(0, 4), record(0, 5)], [False, False, False, True]),
        ([record(0, 0), failure(0, 1), record(0, 2)], [False, False, True]),
        ([failure(0, 0), failure(0, 1), failure(0, 2)], [False, False, True]),
        ([dropped(0, 0, reason="filtered")], [True]),
        ([dropped(0, 0, reason="stale")], [True]),
        ([record(0, 0, task_name="other")], [True]),
    ],
)
def test_the_last_result_ends_its_group(results: list[Any], expected: list[bool]) -> None:
    found = ends()
    assert [found.ends(result) for result in results] == expected


def test_with_more_samples_than_needed_it_ends_with_the_last_that_is_needed() -> None:
    found = ends(oversample=1)
    results: list[Any] = [record(0, 0), record(0, 3), failure(0, 2), record(0, 1)]
    assert [found.ends(result) for result in results] == [False, False, False, True]
    results = [record(1, 0), record(1, 3), record(1, 2), dropped(1, 1)]
    assert [found.ends(result) for result in results] == [False, False, True, False]


def test_what_earlier_processes_stored_counts() -> None:
    found = ends((0, 0), (0, 2), (1, 0))
    assert found.ends(record(0, 1))
    assert not found.ends(record(1, 1))


@given(seed=st.integers(0, 1 << 32), oversample=st.integers(0, 2))
def test_each_group_ends_once_and_nothing_is_kept_of_it(seed: int, oversample: int) -> None:
    chance, found = random.Random(seed), ends(oversample=oversample)
    size = REPEATS + oversample
    results = [
        record(task, rollout) if chance.random() < 0.8 else failure(task, rollout)
        for task in range(5)
        for rollout in range(size)
    ]
    chance.shuffle(results)
    ended = [result.task_index for result in results if found.ends(result)]
    # One that was whole does not end again with its last failure.
    assert sorted(set(ended)) == list(range(5))
    assert not found._open
