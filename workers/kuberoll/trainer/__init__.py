"""A run's trajectories as batches for a trainer: whole prompt groups, each exactly once, as they finish.

docs/training.md is the guide.
"""

from kuberoll.trainer.advantages import dr_grpo, grpo, rloo
from kuberoll.trainer.batch import Batch, InexactTrajectory, RowTooLong
from kuberoll.trainer.groups import Group, GroupKey
from kuberoll.trainer.rollouts import Counts, Rollouts
from kuberoll.trainer.state import StateRefused
from kuberoll_workers.output.run_files import NotARun

__all__ = [
    "Batch",
    "Counts",
    "Group",
    "GroupKey",
    "InexactTrajectory",
    "NotARun",
    "Rollouts",
    "RowTooLong",
    "StateRefused",
    "dr_grpo",
    "grpo",
    "rloo",
]
