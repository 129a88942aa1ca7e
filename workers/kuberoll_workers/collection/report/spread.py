"""Rewards within prompt groups: whether a group has anything to teach."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import Any

import numpy as np

from kuberoll_workers.collection.statistics import describe, describe_groups

_MOST_POINTS = 400
_MEANS, _STDS = 40, 24


class Spread:
    """The rewards of tasks; 16 bytes a trajectory."""

    def __init__(self) -> None:
        self._tasks = array("q")
        self._rewards = array("d")

    def add(self, task_index: int, reward: float) -> None:
        """Take a finished trajectory."""
        self._tasks.append(task_index)
        self._rewards.append(reward)

    def extend(self, other: Spread) -> None:
        """Take the trajectories of another one too; a task is in one environment only."""
        self._tasks.extend(other._tasks)
        self._rewards.extend(other._rewards)

    def as_json(self) -> dict[str, Any]:
        """What groups of two rewards or more come to.

        `equal` of the `groups` have no spread: `highest` of them at the highest reward of all, `lowest` at the lowest;
        none where all rewards are one.
        `points` are `[mean, std, groups]`, single ones while they are few, those of a grid's cells otherwise.
        """
        rewards = np.frombuffer(self._rewards, dtype=np.float64)
        tasks = np.frombuffer(self._tasks, dtype=np.int64)
        names, numbers = np.unique(tasks, return_inverse=True)
        groups = describe_groups(rewards, numbers.astype(np.int64), len(names))
        several = groups.count > 1
        mean, std = groups.mean[several], groups.std[several]
        equal = groups.minimum[several] == groups.maximum[several]
        overall = describe(rewards)
        low, high = float(overall.minimum[0]), float(overall.maximum[0])
        differ = low < high
        return {
            "groups": int(several.sum()),
            "equal": int(equal.sum()),
            "highest": int((equal & (mean == high)).sum()) if differ else 0,
            "lowest": int((equal & (mean == low)).sum()) if differ else 0,
            "mean_std": float(std.mean()) if len(std) else None,
            "points": _points(mean.tolist(), std.tolist()),
        }


def _points(means: list[float], stds: list[float]) -> list[tuple[float, float, int]]:
    points = Counter(zip(means, stds, strict=True))
    if len(points) > _MOST_POINTS:
        width, height = _cell(means, _MEANS), _cell(stds, _STDS)
        cells: Counter[tuple[float, float]] = Counter()
        for (mean, std), count in points.items():
            # A group without spread must not look as if it had one.
            cells[round(mean / width) * width, math.ceil(std / height) * height] += count
        points = cells
    return [(mean, std, count) for (mean, std), count in sorted(points.items())]


def _cell(values: list[float], most: int) -> float:
    return (max(values) - min(values)) / most or 1.0
