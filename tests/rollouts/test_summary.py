"""Metrics of a rollout: one definition for each, whatever the scheduling."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import FailureRecord, Timing, TokenCounts, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import FINISHED
from kuberoll_workers.rollouts.summary import nearest_rank, summarize

RATES = ("natural_termination_rate", "truncation_rate", "max_turns_reached_rate", "failed_rate")


def finished(turns: list[tuple[int, int]], *, reward: float = 0.0, stop_reason: Any = "terminated") -> TrajectoryRecord:
    """A trajectory that generated and observed so many tokens in each turn."""
    messages = [Message(role="user", content="p", token_ids=token_array([1] * 5))]
    for number, (generated, observed) in enumerate(turns, 1):
        messages.append(
            Message(
                "assistant",
                "",
                token_array([1] * generated),
                logprobs=array("f", [0.0] * generated),
                turn=number,
                sampled=True,
            )
        )
        messages.append(Message("environment", "", token_array([1] * observed), turn=number))
    return TrajectoryRecord(
        task_index=0,
        rollout_index=0,
        task_name="env",
        idx=0,
        messages=messages,
        total_reward=reward,
        rewards=[],
        stop_reason=stop_reason,
        turn_count=len(turns),
        tokens=TokenCounts(5, sum(turn[0] for turn in turns), sum(turn[1] for turn in turns)),
        timing=Timing([], []),
        metadata=None,
        seed=None,
        attempt=0,
    )


def failed() -> FailureRecord:
    return FailureRecord(
        task_index=0,
        rollout_index=0,
        task_name="env",
        idx=0,
        kind="policy",
        stage="generation",
        cause="broken",
        tries=1,
        attempt=0,
        turn_count=1,
        seed=None,
        messages=[Message("assistant", "", token_array([1] * 9), turn=1, sampled=True)],
    )


def test_numbers() -> None:
    metrics = summarize(
        [
            finished([(2, 3), (4, 0), (1, 1)], reward=1.0),
            finished([(5, 2)], reward=-2.0, stop_reason="truncated"),
            failed(),
            finished([(0, 0), (3, 3)], reward=4.0, stop_reason="max_turns"),
        ]
    )
    expected = {
        "total_turns": 6,
        "avg_turns_per_sample": 2.0,
        "max_turns_per_sample": 3,
        "turns_per_sample/p95": 3.0,
        "turns_per_sample/p99": 3.0,
        "natural_termination_rate": 0.25,
        "truncation_rate": 0.25,
        "max_turns_reached_rate": 0.25,
        "failed_rate": 0.25,
        "failed_samples": 1,
        "mean_total_tokens_per_sample": 8.0,
        "mean_gen_tokens_per_sample": 5.0,
        "max_gen_tokens_per_sample": 7,
        "mean_env_tokens_per_sample": 3.0,
        "mean_total_reward": 1.0,
        "max_total_reward": 4.0,
        "min_total_reward": -2.0,
        "active_samples_per_turn": [3, 2, 1],
        "total_gen_tokens_per_turn": [7, 7, 1],
    }
    rates = {ending.rate: 0.0 for ending in FINISHED.values()}
    assert metrics == rates | expected


def test_a_turn_generates_tokens_whatever_its_roles_are_called() -> None:
    record = finished([(2, 3)])
    record.messages[2].role = "assistant"
    assert summarize([record])["total_gen_tokens_per_turn"] == [2]


@pytest.mark.parametrize("results", [[], [failed()]])
def test_nothing_has_no_mean(results: list[Any]) -> None:
    metrics = summarize(results)
    for name in ("avg_turns_per_sample", "turns_per_sample/p95", "mean_gen_tokens_per_sample", "mean_total_reward"):
        assert math.isnan(metrics[name])
    assert math.isnan(metrics["max_total_reward"])
    assert math.isnan(metrics["min_total_reward"])
    assert [metrics[name] for name in ("total_turns", "max_turns_per_sample", "max_gen_tokens_per_sample")] == [0, 0, 0]
    assert metrics["active_samples_per_turn"] == metrics["total_gen_tokens_per_turn"] == []
    if results:
        assert [metrics[name] for name in RATES] == [0.0, 0.0, 0.0, 1.0]
    else:
        assert all(math.isnan(metrics[name]) for name in RATES)
    assert metrics["failed_samples"] == len(results)


@pytest.mark.parametrize(
    ("values", "percent", "rank"),
    [([3], 95, 3), (range(1, 101), 95, 95), (range(1, 101), 99, 99), (range(1, 21), 95, 19), ([1, 2], 50, 1)],
)
def test_percentiles_are_values_that_occur(values: Any, percent: float, rank: float) -> None:
    assert nearest_rank(list(values), percent) == rank


@given(
    st.lists(
        st.one_of(
            st.just(None),
            st.tuples(
                st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6),
                st.sampled_from(["terminated", "truncated", "max_turns"]),
            ),
        ),
        min_size=1,
    )
)
def test_everything_adds_up(drawn: list[Any]) -> None:
    results = [failed() if item is None else finished(item[0], stop_reason=item[1]) for item in drawn]
    metrics = summarize(results)
    assert sum(metrics[name] for name in RATES) == pytest.approx(1.0)
    assert sum(metrics["active_samples_per_turn"]) == metrics["total_turns"]
    count = len(results) - metrics["failed_samples"]
    if count:
        assert sum(metrics["total_gen_tokens_per_turn"]) == pytest.approx(metrics["mean_gen_tokens_per_sample"] * count)
        assert metrics["mean_total_tokens_per_sample"] == pytest.approx(
            metrics["mean_gen_tokens_per_sample"] + metrics["mean_env_tokens_per_sample"]
        )
        assert metrics["max_turns_per_sample"] >= metrics["turns_per_sample/p99"] >= metrics["turns_per_sample/p95"]


def test_percentiles_are_those_that_they_are_named() -> None:
    metrics = summarize([finished([(1, 1)] * turns) for turns in range(1, 201)])
    assert (metrics["turns_per_sample/p95"], metrics["turns_per_sample/p99"]) == (190, 198)
