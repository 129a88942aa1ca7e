"""Total reward of a trajectory with its score within its prompt group."""

from __future__ import annotations

from typing import NamedTuple

import numpy

from kuberoll_workers.environments.interface import GroupScore, Metadata
from kuberoll_workers.environments.outcome import check_reward


class Scored(NamedTuple):
    """The fields of a trajectory's record that a score changes."""

    total_reward: float
    metadata: Metadata
    group_reward: float | None = None


def scored(total_reward: float | numpy.float32, metadata: Metadata, score: GroupScore) -> Scored:
    """Add a score to the total of the turns' rewards; the score's metadata, if it has any, is the final state.

    Raises:
        StepInvalid: The sum does not fit float32.
    """
    total, added = numpy.float32(total_reward), numpy.float32(score.reward)
    check_reward(float(total) + float(added), "the sum of the rewards of its turns and its group's")
    # float32, as trainers sum rewards.
    return Scored(float(total + added), metadata if score.metadata is None else score.metadata, score.reward)
