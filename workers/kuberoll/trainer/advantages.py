"""Advantages of the trajectories of one prompt group, relative to the others of the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Rewards = npt.NDArray[np.float64]
"""Rewards of the trajectories of one group, [trajectories], or their advantages in the same order."""

AdvantageFunction = Callable[[Rewards], Rewards]
AdvantageName = Literal["grpo", "rloo", "dr_grpo"]

EPSILON: Final = 1e-6
"""Added to standard deviations: rewards that differ by less than rounding errors have no advantage worth scaling up."""


def grpo(rewards: Rewards) -> Rewards:
    """Reward less the group's mean, divided by the group's standard deviation.

    Group Relative Policy Optimization: Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1.2. The standard
    deviation is that of a sample (n - 1), plus 1e-6. Zero for equal rewards, and for a group of one.
    """
    rewards = _of_one_group(rewards)
    if len(rewards) < 2:
        return np.zeros_like(rewards)
    centered: Rewards = _centered(rewards)
    return np.asarray(centered / (np.std(rewards, ddof=1) + EPSILON))


def rloo(rewards: Rewards) -> Rewards:
    """Reward less the mean reward of the group's other trajectories.

    REINFORCE Leave-One-Out: Ahmadian et al., "Back to Basics", arXiv 2402.14740, section 3.1. Zero for a group of one,
    which has no others to compare it with.
    """
    rewards = _of_one_group(rewards)
    count = len(rewards)
    return _centered(rewards) * (count / (count - 1)) if count > 1 else np.zeros_like(rewards)


def dr_grpo(rewards: Rewards) -> Rewards:
    """Reward less the group's mean, not divided by anything.

    Dr. GRPO: Liu et al., "Understanding R1-Zero-Like Training", arXiv 2503.20783, section 3.2. Its other half, a loss
    that is not divided by each response's length, is the trainer's.
    """
    return _centered(_of_one_group(rewards))


def _of_one_group(rewards: npt.ArrayLike) -> Rewards:
    made = np.asarray(rewards, np.float64)
    if made.ndim != 1 or len(made) == 0:
        raise ValueError(f"rewards: found the shape {made.shape}, expected those of one group, [trajectories]")
    return made


def _centered(rewards: Rewards) -> Rewards:
    # The mean of equal numbers may differ from them by a rounding error.
    return np.zeros_like(rewards) if np.ptp(rewards) == 0 else np.asarray(rewards - np.mean(rewards))


BY_NAME: Final[dict[str, AdvantageFunction]] = {"grpo": grpo, "rloo": rloo, "dr_grpo": dr_grpo}

_OWN_IN_MEAN: Final = (grpo, dr_grpo)


def short_group_factor(function: AdvantageFunction, count: int, wanted: int) -> float:
    """By how much advantages of a group with missing trajectories are multiplied, so that it counts like a whole one.

    A mean that has a reward itself is nearer to it than that of the others: r - mean is (n - 1) / n of what `rloo`
    gives. Of a short group it would be smaller than of a whole one for no other reason than what is missing. `rloo`,
    and functions of the caller's own, are left as they are: 1.

    Args:
        count: Trajectories that the group has.
        wanted: Trajectories that it should have.
    """
    if function not in _OWN_IN_MEAN or not 1 < count < wanted:
        return 1.0
    return (1 - 1 / wanted) / (1 - 1 / count)


def advantage_function(choice: AdvantageName | AdvantageFunction | None) -> AdvantageFunction | None:
    """The function of a choice.

    Raises:
        ValueError: There is none of this name.
    """
    if choice is None or callable(choice):
        return choice
    if choice not in BY_NAME:
        raise ValueError(f"advantages: found {choice!r}; use {', '.join(map(repr, BY_NAME))}, a function, or None")
    return BY_NAME[choice]
