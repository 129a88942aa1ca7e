"""The rollout loop: generate, step the environment, reward, repeat; `docs/explanation/rollouts.md` has its API."""

from __future__ import annotations

from kuberoll_workers.data.prompts import Prompt, Sample, SampleGroup
from kuberoll_workers.data.record import Partial
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from kuberoll_workers.rollouts.groups import GroupPolicy, rewards_differ
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.scheduling import run_groups, run_rollout
from kuberoll_workers.rollouts.settings import RolloutSettings
from kuberoll_workers.rollouts.streaming import stream_groups, stream_trajectories

__all__ = [
    "GroupPolicy",
    "Partial",
    "Prompt",
    "Rollout",
    "RolloutSettings",
    "Sample",
    "SampleGroup",
    "TrajectoryFailed",
    "rewards_differ",
    "run_groups",
    "run_rollout",
    "stream_groups",
    "stream_trajectories",
]
