"""Advantages: values computed by hand, and what holds for all groups."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll.trainer import dr_grpo, grpo, rloo
from kuberoll.trainer.advantages import AdvantageFunction, advantage_function, short_group_factor

ALL = [grpo, rloo, dr_grpo]
rewards = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=16).map(lambda values: np.array(values, float))


def test_values_by_hand() -> None:
    given = np.array([1.0, 0.0, 0.0, 1.0, 3.0])
    # Mean 1, squares 0 + 1 + 1 + 0 + 4 = 6, divided by 4: the standard deviation is the root of 1.5.
    np.testing.assert_allclose(dr_grpo(given), [0, -1, -1, 0, 2])
    np.testing.assert_allclose(grpo(given), np.array([0, -1, -1, 0, 2]) / 1.5**0.5, rtol=1e-5)
    # The others' means are 1, 1.25, 1.25, 1 and 0.5.
    np.testing.assert_allclose(rloo(given), [0, -1.25, -1.25, 0, 2.5])


@pytest.mark.parametrize("function", ALL)
@given(given=rewards)
def test_a_group_s_advantages_have_mean_zero_and_the_order_of_its_rewards(
    function: AdvantageFunction, given: np.ndarray
) -> None:
    found = function(given)
    assert found.shape == given.shape
    assert abs(found.mean()) < 1e-9 * max(1.0, float(np.abs(given).max()))
    assert all(found[a] <= found[b] for a in range(len(given)) for b in range(len(given)) if given[a] < given[b])
    # A constant that all rewards share changes nothing.
    np.testing.assert_allclose(function(given + 8), found, atol=1e-2 if function is grpo else 1e-9)


@pytest.mark.parametrize("function", ALL)
@given(reward=st.floats(-1e6, 1e6), count=st.integers(1, 9))
def test_equal_rewards_and_a_group_of_one_have_none(function: AdvantageFunction, reward: float, count: int) -> None:
    assert not function(np.full(count, reward)).any()


@given(given=rewards.filter(lambda values: len(values) > 1 and np.std(values) > 0.01), scale=st.floats(0.5, 100))
def test_grpo_does_not_depend_on_the_scale_of_rewards(given: np.ndarray, scale: float) -> None:
    np.testing.assert_allclose(grpo(given * scale), grpo(given), atol=1e-3)


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("shape", [(2, 4), (0,), ()], ids=str)
def test_rewards_are_of_one_group(function: AdvantageFunction, shape: tuple[int, ...]) -> None:
    # Of several groups the mean would be that of all of them.
    with pytest.raises(ValueError, match=rf"found the shape {re.escape(str(shape))}, expected those of one group"):
        function(np.zeros(shape))


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="found 'ppo'; use 'grpo', 'rloo', 'dr_grpo', a function, or None"):
        advantage_function("ppo")  # type: ignore[arg-type]


def exact_gradient(function: AdvantageFunction, chance: float, count: int, wanted: int) -> float:
    """Mean of advantage times score (reward less `chance`), over all groups of `count` right and wrong samples."""
    total = 0.0
    for rewards in itertools.product((0.0, 1.0), repeat=count):
        given = np.array(rewards)
        likely = float(np.prod(np.where(given > 0, chance, 1 - chance)))
        advantages = function(given) * short_group_factor(function, count, wanted)
        total += likely * float(np.mean(advantages * (given - chance)))
    return total


@pytest.mark.parametrize("function", [rloo, dr_grpo])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.8])
def test_a_short_group_s_gradient_is_that_of_a_whole_one(function: AdvantageFunction, chance: float) -> None:
    """Unbiased whatever is missing, if that does not depend on rewards."""
    whole = exact_gradient(function, chance, 6, 6)
    assert whole == pytest.approx(chance * (1 - chance) * (1 if function is rloo else 5 / 6))
    for count in range(2, 6):
        assert exact_gradient(function, chance, count, 6) == pytest.approx(whole)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.8])
def test_grpo_s_short_groups_are_nearer_to_whole_ones_than_without_the_factor(chance: float) -> None:
    """What is left is of the standard deviation of few, which is too small on average."""
    whole = exact_gradient(grpo, chance, 6, 6)
    for count in range(2, 6):
        mended = exact_gradient(grpo, chance, count, 6)
        plain = mended / short_group_factor(grpo, count, 6)
        assert abs(mended - whole) < abs(plain - whole)


def test_only_means_with_the_own_reward_have_a_factor() -> None:
    assert short_group_factor(grpo, 2, 4) == short_group_factor(dr_grpo, 2, 4) == 1.5
    for function in (rloo, lambda rewards: rewards):
        assert short_group_factor(function, 2, 4) == 1
    assert [short_group_factor(grpo, count, 4) for count in (1, 4, 5)] == [1, 1, 1]
