"""Advantages: values computed by hand, and what holds for all groups."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll.trainer import dr_grpo, grpo, rloo
from kuberoll.trainer.advantages import AdvantageFunction, advantage_function

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
