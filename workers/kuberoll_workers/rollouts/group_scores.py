"""Scores of prompt groups: what an environment is given of each trajectory, and its scores in their records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kuberoll_workers.data.messages import chat_message
from kuberoll_workers.data.prompts import SampleGroup
from kuberoll_workers.data.record import TrajectoryKey, TrajectoryRecord
from kuberoll_workers.environments.interface import GroupMember
from kuberoll_workers.environments.outcome import EnvironmentFault
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from kuberoll_workers.rollouts.trajectory import Trajectory


def member_of(record: TrajectoryRecord) -> GroupMember:
    """What an environment is given of a finished trajectory."""
    return GroupMember(
        id=f"{record.task_index}-{record.rollout_index}-{record.attempt}",
        messages=[chat_message(message) for message in record.messages],
        metadata=record.metadata,
        reward=sum(record.rewards),
        stop_reason=record.stop_reason,
        answer=record.answer,
        group_reward=record.group_reward,
    )


async def score(environment: EnvironmentRunner, group: SampleGroup, trajectories: Sequence[Trajectory]) -> None:
    """Score the ended trajectories of a group, together with those that are stored already; see `Trajectory.score`.

    Trajectories without a turn are left out: there is nothing to score.

    Raises:
        EnvironmentFault: The environment is at fault; none of the trajectories has a score.
        TrajectoryFailed: The stored trajectories cannot be read.
    """
    new = {trajectory.sample.key: trajectory for trajectory in trajectories if trajectory.turn}
    if not new:
        return
    records = {key: trajectory.record() for key, trajectory in new.items()}
    if group.stored is not None:
        try:
            stored = await asyncio.to_thread(group.stored)
        except (OSError, ValueError) as error:
            cause = f"the stored trajectories of its group cannot be read: {error}"
            raise TrajectoryFailed(cause, reason="StorageFailed", stage="group") from error
        records.update((record.key, record) for record in stored if record.turn_count)
    keys: list[TrajectoryKey] = sorted(records)
    scores = await environment.score_group([member_of(records[key]) for key in keys])
    try:
        for key, result in zip(keys, scores, strict=True):
            if key in new:
                new[key].score(result)
    except EnvironmentFault:
        for trajectory in new.values():
            trajectory.group_score = None
        raise
