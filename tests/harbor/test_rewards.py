"""Rewards: a file that is missing or unreadable is a failure, and never a reward of 0."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.harbor.rewards import (
    MissingReward,
    RewardError,
    UnreadableReward,
    combine,
    read_reward,
    shortfall,
    worth,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**80), 2**80)
REWARDS = st.dictionaries(st.text(max_size=5), st.floats(-1e9, 1e9), max_size=4)


def test_reward_json_comes_before_reward_txt() -> None:
    assert read_reward("0.5\n", None) == {"reward": 0.5}
    assert read_reward("0.5", '{"reward": 1, "form": 0.25}') == {"reward": 1.0, "form": 0.25}
    assert read_reward(b"1", b'{"passed": true}') == {"passed": 1.0}


def test_a_reward_of_this_name_counts_alone() -> None:
    assert worth({"form": 0.5, "reward": 1.0}) == {"reward": 1.0}
    assert worth({"form": 0.5, "right": 1.0}) == {"form": 0.5, "right": 1.0}


@pytest.mark.parametrize(
    ("text", "json_text", "error", "words"),
    [
        (None, None, MissingReward, "the tests have written neither reward.json nor reward.txt in /logs/verifier"),
        ("", None, MissingReward, "the tests have left reward.txt empty"),
        ("1", "", MissingReward, "the tests have left reward.json empty"),
        ("passed\n", None, UnreadableReward, "reward.txt: found 'passed\\n'; it must be one number"),
        ("nan", None, UnreadableReward, "reward.txt: found nan; it must be a finite number"),
        ("1e999", None, UnreadableReward, "reward.txt: found inf; it must be a finite number"),
        (b"\xff", None, UnreadableReward, "reward.txt is not UTF-8"),
        ("1", "1.0", UnreadableReward, 'reward.json: found 1.0; it must be an object of numbers: {"reward": 1.0}'),
        (
            None,
            '{"a": null}',
            UnreadableReward,
            "reward.json: a: found a value of type NoneType; it must be a finite number",
        ),
        (None, '{"a": "1"}', UnreadableReward, "reward.json: a: found '1'; it must be a finite number"),
        (None, '{"a": NaN}', UnreadableReward, "reward.json: a: found nan; it must be a finite number"),
        (
            None,
            '{"a": ' + "9" * 400 + "}",
            UnreadableReward,
            "reward.json: a: found a value of type int; it must be a finite number",
        ),
        (None, '{"a": ' + "9" * 10**5 + "}", UnreadableReward, "reward.json: a: found inf; it must be a finite number"),
        ("1" + " " * (1 << 20), None, UnreadableReward, "reward.txt is longer than 1,048,576 characters"),
    ],
)
def test_no_reward_is_a_failure_that_says_so(
    text: str | bytes | None, json_text: str | None, error: type[RewardError], words: str
) -> None:
    with pytest.raises(error) as caught:
        read_reward(text, json_text)
    assert str(caught.value).startswith(words)


def test_nesting_beyond_the_stack_is_refused() -> None:
    with pytest.raises(UnreadableReward, match="not JSON"):
        read_reward(None, '{"a":' * 10**5)


@given(NUMBERS)
def test_a_number_is_read_exactly(number: float) -> None:
    assert read_reward(f" {number!r}\n", None) == {"reward": float(number)}


@given(st.dictionaries(st.text(max_size=10), NUMBERS, max_size=5))
def test_an_object_of_numbers_is_read_exactly(rewards: dict[str, float]) -> None:
    assert read_reward("0", json.dumps(rewards)) == {name: float(value) for name, value in rewards.items()}


@given(
    st.none() | st.binary(max_size=40) | st.text(max_size=40),
    st.none() | st.binary(max_size=40) | st.text('{}[]":,0e9-', max_size=20),
)
def test_whatever_tests_write_gives_finite_rewards_or_an_error(
    text: str | bytes | None, json_text: str | bytes | None
) -> None:
    try:
        found = read_reward(text, json_text)
    except RewardError:
        return
    assert all(type(value) is float and math.isfinite(value) for value in found.values())


def test_a_mean_is_over_the_steps_that_have_rewards() -> None:
    steps = [{"reward": 1.0}, None, {"reward": 0.0, "form": 0.5}]
    assert combine(steps, "mean") == {"reward": 0.5, "form": 0.25}
    assert combine(steps, None) == combine(steps, "mean")
    assert combine(steps, "final") == {"reward": 0.0, "form": 0.5}


@pytest.mark.parametrize("steps", [[], [None], [{}], [None, None]])
def test_steps_without_rewards_have_none_together(steps: list[dict[str, float] | None]) -> None:
    assert combine(steps, "mean") is None


def test_the_last_step_alone_decides_if_the_task_says_so() -> None:
    assert combine([{"reward": 1.0}, None], "final") is None
    assert combine([], "final") is None


@given(st.lists(REWARDS | st.none(), max_size=5))
def test_a_mean_lies_between_its_rewards(steps: list[dict[str, float] | None]) -> None:
    known = [one for one in steps if one is not None]
    found = combine(steps, "mean")
    assert (found is None) == (not any(known))
    for name, value in (found or {}).items():
        values = [one.get(name, 0.0) for one in known]
        assert min(values) - 1e-3 <= value <= max(values) + 1e-3


@pytest.mark.parametrize(
    ("rewards", "least", "words"),
    [
        ({"reward": 0.4}, None, None),
        ({"reward": 0.5}, 0.5, None),
        ({"reward": 0.4}, 0.5, "reward is 0.4, and min_reward 0.5"),
        ({"form": 1.0}, 0.5, "reward is missing, and min_reward 0.5"),
        (None, -1.0, "reward is missing, and min_reward -1.0"),
        ({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.5}, "b is 0.0, and min_reward 0.5"),
    ],
)
def test_a_step_begins_with_enough_reward_only(
    rewards: dict[str, float] | None, least: float | dict[str, float] | None, words: str | None
) -> None:
    assert shortfall(rewards, least) == words
