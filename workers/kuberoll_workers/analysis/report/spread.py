"""Spread of rewards within prompt groups: groups without one have nothing to teach."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kuberoll_workers.analysis.aggregation.environments import Tasks
from kuberoll_workers.analysis.aggregation.table import REWARD
from kuberoll_workers.analysis.statistics import describe, describe_groups

_MOST_POINTS = 400
_MEANS, _STDS = 40, 24


def spread(environments: Sequence[Tasks]) -> dict[str, Any]:
    """Count the groups with at least two rewards, and those among them without a spread.

    `equal` of the `groups` have no spread: `highest` of them at the highest reward of their environment, `lowest` at
    the lowest; both are 0 if all its rewards are equal. `points` are `[mean, std, groups]`, merged to a grid if there
    are many.
    """
    means: list[float] = []
    stds: list[float] = []
    equal = highest = lowest = 0
    for tasks in environments:
        rewards = tasks.frame.columns[REWARD].values
        groups = describe_groups(rewards, tasks.of_row, len(tasks.indexes))
        several = groups.count > 1
        mean = groups.mean[several]
        same = groups.minimum[several] == groups.maximum[several]
        overall = describe(rewards)
        low, high = overall.minimum[0], overall.maximum[0]
        equal += int(same.sum())
        if low < high:
            highest += int((same & (mean == high)).sum())
            lowest += int((same & (mean == low)).sum())
        means += mean.tolist()
        stds += groups.std[several].tolist()
    return {
        "groups": len(means),
        "equal": equal,
        "highest": highest,
        "lowest": lowest,
        "mean_std": float(np.mean(stds)) if stds else None,
        "points": _points(means, stds),
    }


def _points(means: list[float], stds: list[float]) -> list[tuple[float, float, int]]:
    # Rounding must not merge groups with a spread into those without one.
    return merged_points(means, stds, columns=_MEANS, rows=_STDS, upwards=True)


def merged_points(
    horizontal: list[float], vertical: list[float], *, columns: int = 40, rows: int = 40, upwards: bool = False
) -> list[tuple[float, float, int]]:
    """Points `(x, y, count)`, merged to a grid of this size if more than 400 differ.

    Args:
        upwards: Round the vertical values up, so that only 0 becomes 0.
    """
    points = Counter(zip(horizontal, vertical, strict=True))
    if len(points) > _MOST_POINTS:
        width, height = _cell(horizontal, columns), _cell(vertical, rows)
        rounded = math.ceil if upwards else round
        cells: Counter[tuple[float, float]] = Counter()
        for (x, y), count in points.items():
            cells[round(x / width) * width, rounded(y / height) * height] += count
        points = cells
    return [(x, y, count) for (x, y), count in sorted(points.items())]


def _cell(values: list[float], most: int) -> float:
    return (max(values) - min(values)) / most or 1.0
