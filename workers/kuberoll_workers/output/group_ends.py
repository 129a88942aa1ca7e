"""Which of a worker's results end their prompt group: a consumer has a use for whole groups only."""

from __future__ import annotations

from collections.abc import Mapping

from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryKey, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import WHOLE_GROUP
from kuberoll_workers.output.key_set import KeySet

Result = TrajectoryRecord | FailureRecord | DroppedRecord


class GroupEnds:
    """Counts the results of each prompt group that is in progress."""

    def __init__(self, *, repeats: Mapping[str, int], oversample: int, stored: KeySet) -> None:
        """
        Args:
            repeats: Samples of a whole group, by environment.
            oversample: Further samples that are started for each.
            stored: Trajectories that earlier processes finished.
        """
        self._repeats = repeats
        self._oversample = oversample
        self._stored = stored
        # Finished ones, and all results, by task and number of the group.
        self._open: dict[tuple[int, int], tuple[int, int]] = {}

    def ends(self, result: Result) -> bool:
        """True if the group has ended with this result: it is whole, or has nothing in progress, or is given up."""
        if (repeats := self._repeats.get(result.task_name)) is None:
            return True
        size = repeats + self._oversample
        group = result.task_index, result.rollout_index // size
        finished, results = self._open.get(group) or self._before(group, size)
        results += 1
        finished += isinstance(result, TrajectoryRecord)
        if results < size:
            self._open[group] = finished, results
        else:
            self._open.pop(group, None)
        if isinstance(result, DroppedRecord):
            return result.reason in WHOLE_GROUP
        if isinstance(result, TrajectoryRecord) and finished >= repeats:
            return finished == repeats
        return results >= size

    def _before(self, group: tuple[int, int], size: int) -> tuple[int, int]:
        task, number = group
        rollouts = range(number * size, (number + 1) * size)
        stored = sum(TrajectoryKey(task, rollout) in self._stored for rollout in rollouts)
        return stored, stored
