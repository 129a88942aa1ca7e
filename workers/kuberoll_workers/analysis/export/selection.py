"""Selection of the trajectories to export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kuberoll_workers.analysis.export.samplings import is_of
from kuberoll_workers.analysis.export.views import responses
from kuberoll_workers.data.record import TrajectoryKey, TrajectoryRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Criteria of the selection; the defaults select everything.

    Attributes:
        environments: Names; empty for all.
        stop_reasons: Stop reasons; empty for all.
        min_reward: Minimum total reward.
        temperature: Only those whose responses are all of the whole distribution at this temperature.
        best_of_group: Only the sample of each task with the highest reward among those that match the other criteria;
            of equal ones the one with the lowest rollout index.
        limit: Maximum number of trajectories.
    """

    environments: frozenset[str] = frozenset()
    stop_reasons: frozenset[str] = frozenset()
    min_reward: float | None = None
    temperature: float | None = None
    best_of_group: bool = False
    limit: int | None = None


@dataclass(slots=True)
class SelectionCounts:
    """Number of selected trajectories, of their branches, and of those that were left out, by reason."""

    selected: int = 0
    branches: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    environments: set[str] = field(default_factory=set)


def select(
    read: Callable[[], Iterable[TrajectoryRecord]], selection: Selection, counts: SelectionCounts
) -> Iterator[TrajectoryRecord]:
    """Selected trajectories in their stored order; streamed.

    Args:
        read: Reads all trajectories from the start, with the `sampling` of each response; called twice with
            `best_of_group`.
        counts: Counts, which are updated.
    """
    best = _best_of_groups(read(), selection) if selection.best_of_group else None
    for record in read():
        if counts.selected == selection.limit:
            return
        counts.environments.add(record.task_name)
        reason = _reason_against(record, selection)
        if reason is None and best is not None and best[record.task_index] != record.key:
            reason = "not the best of its group"
        if reason is not None:
            counts.left_out[reason] += 1
            continue
        counts.selected += 1
        yield record


def _reason_against(record: TrajectoryRecord, selection: Selection) -> str | None:
    if selection.environments and record.task_name not in selection.environments:
        return "of another environment"
    if selection.stop_reasons and record.stop_reason not in selection.stop_reasons:
        return "of another stop reason"
    if selection.min_reward is not None and record.total_reward < selection.min_reward:
        return "of less reward"
    if not responses(record):
        return "without a response"
    if selection.temperature is not None and not is_of(record, selection.temperature):
        return "sampled otherwise"
    return None


def _best_of_groups(records: Iterable[TrajectoryRecord], selection: Selection) -> dict[int, TrajectoryKey]:
    """The best trajectory of each task; memory: about 200 bytes per task."""
    best: dict[int, tuple[float, int]] = {}
    for record in records:
        if _reason_against(record, selection) is None:
            rank = (record.total_reward, -record.rollout_index)
            best[record.task_index] = max(rank, best.get(record.task_index, rank))
    return {task: TrajectoryKey(task, -index) for task, (_, index) in best.items()}
