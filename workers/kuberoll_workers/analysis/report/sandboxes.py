"""Sandboxes that a run's trajectories had, by what their metadata says."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kuberoll_workers.analysis.statistics import Floats
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.sandbox_uses import uses_of


class Sandboxes(NamedTuple):
    """Sandboxes of trajectories.

    Attributes:
        starts: Seconds of each one's start.
        most: The largest number of them at one time.
        lost: Those that were lost, and are not among the others.
        left: Those that could not be removed.
    """

    starts: Floats
    most: int
    lost: int
    left: int


class SandboxTimes:
    """Collects the sandboxes of finished trajectories, 24 bytes for each."""

    def __init__(self) -> None:
        self._times: dict[str, array[float]] = {}
        self._lost: Counter[str] = Counter()
        self._left: Counter[str] = Counter()

    def add(self, record: TrajectoryRecord) -> None:
        """Add those of a trajectory."""
        found = uses_of(record.metadata)
        if found is None:
            return
        times = self._times.setdefault(record.task_name, array("d"))
        self._lost[record.task_name] += found.lost
        for use in found.uses:
            times.extend((use.start_seconds, use.began, use.began + use.seconds))
            self._left[record.task_name] += use.left

    def of(self, environments: Sequence[str]) -> Sandboxes | None:
        """Those of these environments together; None if their trajectories had none."""
        parts = [np.frombuffer(self._times[name]).reshape(-1, 3) for name in environments if self._times.get(name)]
        if not parts:
            return None
        starts, began, ended = np.concatenate(parts).T
        return Sandboxes(
            starts=starts,
            most=most_at_once(began, ended),
            lost=sum(self._lost[name] for name in environments),
            left=sum(self._left[name] for name in environments),
        )


def most_at_once(began: Floats, ended: Floats) -> int:
    """The largest number of intervals `[began, ended)` that have a moment in common."""
    moments = np.concatenate([began, ended])
    steps = np.concatenate([np.ones(len(began), dtype=np.int64), -np.ones(len(ended), dtype=np.int64)])
    # At one moment, ends come before beginnings.
    return int(np.cumsum(steps[np.lexsort((steps, moments))]).max(initial=0))
