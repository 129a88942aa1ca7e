"""Prompt groups of a rescoring: their trajectories are scored together once all of them have been replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kuberoll_workers.data.record import TrajectoryKey, TrajectoryRecord
from kuberoll_workers.environments.interface import GroupScore
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from kuberoll_workers.rollouts.rewards import scored


@dataclass(frozen=True, slots=True)
class Rescored:
    """A trajectory after its replay.

    Attributes:
        old: The stored trajectory.
        new: Its replacement, or why there is none.
        reason: Why it was left unchanged; empty if it was rescored.
    """

    old: TrajectoryRecord
    new: TrajectoryRecord | TrajectoryFailed
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReplayedGroup:
    """A prompt group whose trajectories are being replayed.

    Attributes:
        keys: All trajectories that the source has of it.
        replayed: Those that have been replayed.
    """

    keys: set[TrajectoryKey] = field(default_factory=set)
    replayed: list[Rescored] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.replayed) == len(self.keys)


def groups_of(trajectories: Iterable[TrajectoryRecord], sizes: Mapping[str, int]) -> dict[TrajectoryKey, ReplayedGroup]:
    """The groups of trajectories, by the key of each member.

    Args:
        sizes: Rollout indexes of a row's group, with oversampled ones, by environment; others have no groups.
    """
    groups: dict[tuple[int, int], ReplayedGroup] = {}
    found: dict[TrajectoryKey, ReplayedGroup] = {}
    for record in trajectories:
        if (size := sizes.get(record.task_name)) is not None:
            # A row that occurs again continues the numbering.
            group = groups.setdefault((record.task_index, record.rollout_index // size), ReplayedGroup())
            group.keys.add(record.key)
            found[record.key] = group
    return found


def with_group_score(record: TrajectoryRecord, score: GroupScore) -> TrajectoryRecord:
    """A replayed trajectory with its score within its prompt group.

    Raises:
        StepInvalid: The total reward does not fit float32.
    """
    return dataclasses.replace(record, **scored(record.total_reward, record.metadata, score)._asdict())
