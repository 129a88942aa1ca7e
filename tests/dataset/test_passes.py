"""Passes over a dataset: the same rows in other orders, and keys that are unique over all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.dataset import passes as module
from kuberoll_workers.dataset.inputs import prompt_groups, scan
from kuberoll_workers.dataset.passes import passes
from kuberoll_workers.dataset.rows import Row
from tests.dataset.test_reading import Generator, dataset, job, no_environment, rows


def made(count: int) -> list[Row]:
    if not count:
        return []
    return rows(dataset({"generator": {"count": count, "environments": ["a"]}}))


@given(st.integers(0, 12), st.integers(1, 4), st.none() | st.integers(0, 2**63 - 1))
def test_every_pass_has_every_row_once(count: int, turns: int, seed: int | None) -> None:
    first = made(count)
    found = list(passes(iter(first), turns, seed=seed))
    assert found[:count] == first
    assert found == list(passes(iter(first), turns, seed=seed))
    for turn in range(turns):
        one = found[turn * count : (turn + 1) * count]
        assert sorted(row.content for row in one) == sorted(row.content for row in first)
        if seed is None:
            assert one == first


def test_shuffled_passes_have_orders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # On disk after the first rows.
    monkeypatch.setattr(module, "_MEMORY_BYTES", 1000)
    found = [row.content for row in passes(iter(made(50)), 4, seed=7)]
    orders = {tuple(found[turn * 50 : (turn + 1) * 50]) for turn in range(4)}
    assert len(orders) == 4


def test_a_pass_does_not_wait_for_the_end_of_the_first() -> None:
    taken = 0

    def counted() -> Any:
        nonlocal taken
        for row in made(5):
            taken += 1
            yield row

    stream = passes(counted(), 2, seed=None)
    next(stream)
    assert taken == 1


@given(st.integers(1, 3), st.integers(0, 2), st.lists(st.sampled_from("xyz"), min_size=1, max_size=6))
def test_keys_are_unique_and_counts_those_of_the_scan(epochs: int, oversample: int, prompts: list[str]) -> None:
    # Equal rows are one task within a pass, too.
    raw = [{"prompt": prompt, "task_name": "ab"[number % 2]} for number, prompt in enumerate(prompts)]
    document = job({"rows": raw}, epochs=epochs, shuffleSeed=3).model_dump(mode="json", by_alias=True)
    document["spec"]["rollout"]["groups"]["oversample"] = oversample
    given_job = RolloutJob.model_validate(document)
    groups = list(prompt_groups(given_job, base=Path(), environment=no_environment))
    keys = [(group.task_index, index) for group in groups for index in group.rollout_indexes]
    assert len(keys) == len(set(keys))
    summary = scan(given_job, base=Path(), environment=no_environment)
    assert (summary.rows, summary.trajectories) == (len(raw), sum(group.keep for group in groups))
    assert len(groups) == epochs * len(raw)
    assert summary.rollouts == max(index for _, index in keys) + 1
    assert summary.tasks == len({task for task, _ in keys})
    assert sum(summary.trajectories_of.values()) == summary.trajectories
    # The rows that the run was checked with are those of one pass.
    assert list(prompt_groups(given_job, base=Path(), environment=no_environment, blocks=summary.blocks)) == groups


def test_a_source_is_read_once() -> None:
    asked: list[str] = []

    def environment(name: str) -> Any:
        asked.append(name)
        return Generator()

    given_job = job({"generator": {"count": 3, "environments": ["a"]}}, epochs=3)
    assert len(list(prompt_groups(given_job, base=Path(), environment=environment))) == 9
    assert asked == ["a"]
