"""Advantages where trajectories are missing, beside the same seeds without faults, through a run's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kuberoll.trainer.advantages import AdvantageName
from kuberoll_workers.analysis.statistics import run_mean
from tests.trainer.simulated_grpo import FAULTS, SAMPLES, Fault, SimulatedRun, Treatment, play, train, true_gradient


def run(
    directory: Path, fault: Fault, treatment: Treatment = "short", *, seed: int = 7, prompts: int = 8
) -> SimulatedRun:
    place = directory / f"{fault}-{treatment}-{seed}"
    return SimulatedRun(place, play(seed, fault, prompts=prompts), fault, treatment)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_left_of_a_group_is_what_was_not_struck(tmp_path: Path, fault: Fault) -> None:
    played = play(7, fault, prompts=8)
    found = run(tmp_path, fault)
    advantages = found.step("rloo").advantages
    # A group of one has advantages, too: of 0.
    assert np.array_equal(np.isnan(advantages), played.removed)
    for task in range(8):
        left = np.flatnonzero(1 - played.removed[task].astype(int))
        rewards = played.right[task, left].astype(float)
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        np.testing.assert_allclose(advantages[task, left], rewards - others, atol=1e-6)
    removal = found.removal()
    assert (0 if removal is None else removal.removed) == played.removed.sum()
    assert (fault == "none") == (removal is None)


def test_masked_groups_are_not_delivered_and_scored_ones_miss_nothing(tmp_path: Path) -> None:
    whole = play(7, "limit", prompts=8).removed.sum(axis=1) == 0
    advantages = run(tmp_path, "limit", "masked").step("grpo").advantages
    assert np.array_equal(~np.isnan(advantages), np.repeat(whole[:, None], SAMPLES, axis=1))
    # What was over the limit was wrong: it had no reward without a limit either.
    np.testing.assert_array_equal(
        run(tmp_path, "limit", "scored").step("grpo").advantages, run(tmp_path, "none").step("grpo").advantages
    )


class Differences:
    """Of each seed: mean difference of advantages, that of the gradient, the gradient without faults, the verdict."""

    def __init__(
        self, directory: Path, fault: Fault, names: Sequence[AdvantageName], *, seeds: int, prompts: int
    ) -> None:
        (directory / "struck").mkdir()
        self.advantages: dict[str, list[float]] = {name: [] for name in names}
        self.gradients: dict[str, list[float]] = {name: [] for name in names}
        self.plain: dict[str, list[float]] = {name: [] for name in names}
        self.verdicts: list[str] = []
        for seed in range(seeds):
            whole = run(directory, "none", seed=seed, prompts=prompts)
            struck = run(directory / "struck", fault, seed=seed, prompts=prompts)
            for name in names:
                plain, step = whole.step(name), struck.step(name)
                self.advantages[name].append(float(np.nanmean(step.advantages - plain.advantages)))
                self.gradients[name].append(step.gradient - plain.gradient)
                self.plain[name].append(plain.gradient)
            removal = struck.removal()
            assert removal is not None
            self.verdicts.append(removal.verdict)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of their mean."""
    found = run_mean(values)
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


@pytest.mark.slow
def test_faults_that_strike_all_alike_leave_advantages_and_gradients_unbiased(tmp_path: Path) -> None:
    found = Differences(tmp_path, "start", ("rloo", "dr_grpo"), seeds=30, prompts=32)
    for name, factor in (("rloo", 1.0), ("dr_grpo", 1 - 1 / SAMPLES)):
        low, high = interval(found.advantages[name])
        assert low < 0 < high
        low, high = interval(found.gradients[name])
        assert low < 0 < high
        # Which says something: the gradient itself is not 0, and the interval is narrow.
        truth = factor * true_gradient(0.5)
        assert high - low < abs(truth)
        low, high = interval(found.plain[name])
        assert low < truth < high < 0
    assert not {"longer", "exposed"} & set(found.verdicts)


@pytest.mark.slow
def test_a_time_limit_biases_both_and_is_found(tmp_path: Path) -> None:
    found = Differences(tmp_path, "limit", ("rloo",), seeds=8, prompts=64)
    # The baseline is too high, and thinking long seems to pay.
    assert interval(found.advantages["rloo"])[1] < -0.03
    assert interval(found.gradients["rloo"])[0] > 0.5 * abs(true_gradient(0.5))
    assert set(found.verdicts) == {"longer"}


@pytest.mark.slow
def test_a_policy_trained_under_a_time_limit_learns_otherwise(tmp_path: Path) -> None:
    ends = {}
    for fault in ("none", "start", "limit"):
        (tmp_path / fault).mkdir()
        ends[fault] = train(tmp_path / fault, fault, "short", seed=1, steps=12, prompts=32, rate=4.0)
    assert ends["none"] < 0.45
    assert abs(ends["start"] - ends["none"]) < 0.5 * (0.5 - ends["none"])
    assert ends["limit"] > ends["none"] + 0.05
