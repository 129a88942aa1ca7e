"""Metrics of two runs by task, and their differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kuberoll_workers.analysis.aggregation.aggregates import Aggregates
from kuberoll_workers.analysis.aggregation.environments import Tasks
from kuberoll_workers.analysis.aggregation.table import REWARD, SECONDS, TOKENS, TURNS
from kuberoll_workers.analysis.statistics import (
    Difference,
    Floats,
    Integers,
    best_of_k,
    describe_groups,
    paired_difference,
    pass_at_k,
    unpaired_difference,
)
from kuberoll_workers.data.stop_reasons import FINISHED

Kind = Literal["number", "share", "seconds"]


@dataclass(frozen=True, slots=True)
class TaskValues:
    """A metric's value for each task of one run.

    Attributes:
        tasks: Task indexes, ascending.
        values: NaN for a task without a value.
    """

    tasks: Integers
    values: Floats

    @property
    def finite(self) -> TaskValues:
        """Those tasks that have a value."""
        known = np.isfinite(self.values)
        return TaskValues(self.tasks[known], self.values[known])


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of two runs.

    Attributes:
        kind: `share` for numbers from 0 to 1.
        paired: True if the difference is that of tasks that both runs have.
    """

    name: str
    kind: Kind
    paired: bool
    difference: Difference

    def as_json(self) -> dict[str, Any]:
        """Form in which the page has it."""
        return {"name": self.name, "kind": self.kind, "paired": self.paired, **self.difference._asdict()}


def environment_metrics(
    first: Aggregates, second: Aggregates, environments: Sequence[str], *, paired: bool
) -> list[Metric]:
    """Metrics of environments that both runs have, as means over tasks.

    Args:
        paired: True if equal task indexes are equal tasks.
    """
    one, two = ([run.tasks[name] for name in environments] for run in (first, second))
    return [
        compare(name, kind, _joined(one, first, measure), _joined(two, second, measure), paired=paired)
        for name, kind, measure in _measures(one, two)
    ]


def compare(name: str, kind: Kind, first: TaskValues, second: TaskValues, *, paired: bool) -> Metric:
    """The difference of a metric of two runs; tasks without a value are left out."""
    one, two = first.finite, second.finite
    if paired:
        _, places, others = np.intersect1d(one.tasks, two.tasks, assume_unique=True, return_indices=True)
        found = paired_difference(one.values[places], two.values[others])
    else:
        found = unpaired_difference(one.values, two.values)
    if kind == "share" and found.low is not None and found.high is not None:
        # Shares cannot differ by more.
        found = found._replace(low=max(-1.0, found.low), high=min(1.0, found.high))
    return Metric(name=name, kind=kind, paired=paired, difference=found)


def reward_by_task(tasks: Sequence[Tasks], run: Aggregates) -> TaskValues:
    """Mean reward of each task."""
    return _joined(tasks, run, _Mean(REWARD))


class _Mean:
    """Mean of a field over the finished trajectories of each task."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __call__(self, tasks: Tasks, run: Aggregates) -> Floats:  # noqa: ARG002 - as all measures
        return describe_groups(tasks.frame.columns[self._field].values, tasks.of_row, len(tasks.indexes)).mean


class _Tries:
    """Success of k samples of each task, or their expected best reward; NaN for tasks with fewer samples."""

    def __init__(self, k: int, *, binary: bool) -> None:
        self._k = k
        self._binary = binary

    def __call__(self, tasks: Tasks, run: Aggregates) -> Floats:  # noqa: ARG002
        found = np.full(len(tasks.indexes), np.nan)
        rewards = tasks.frame.columns[REWARD].values
        for task in range(len(tasks.indexes)):
            own = rewards[tasks.starts[task] : tasks.starts[task + 1]]
            own = np.sort(own[np.isfinite(own)])
            if len(own) >= self._k:
                found[task] = pass_at_k(len(own), int(own.sum()), self._k) if self._binary else best_of_k(own, self._k)
        return found


class _StopReason:
    """Share of the finished trajectories of each task that ended for a reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __call__(self, tasks: Tasks, run: Aggregates) -> Floats:
        names = run.contents.stop_reasons
        place = list(names).index(self._reason) if self._reason in names else -1
        ended = (tasks.frame.stop_reasons == place).astype(np.float64)
        return describe_groups(ended, tasks.of_row, len(tasks.indexes)).mean


def _signal(tasks: Tasks, run: Aggregates) -> Floats:  # noqa: ARG001
    """1 for a task with rewards that differ, 0 if all are equal; NaN with fewer than two."""
    groups = describe_groups(tasks.frame.columns[REWARD].values, tasks.of_row, len(tasks.indexes))
    return np.where(groups.count > 1, (groups.minimum < groups.maximum).astype(np.float64), np.nan)


def _failed(tasks: Tasks, run: Aggregates) -> Floats:  # noqa: ARG001
    """Share of the trajectories of each task that failed permanently."""
    return tasks.failed / (tasks.failed + tasks.sizes)


def _measures(first: Sequence[Tasks], second: Sequence[Tasks]) -> Iterator[tuple[str, Kind, Any]]:
    rewards = np.concatenate([tasks.frame.columns[REWARD].values for tasks in (*first, *second)])
    finite = rewards[np.isfinite(rewards)]
    binary = bool(finite.size and np.isin(finite, (0.0, 1.0)).all())
    yield ("success rate" if binary else "reward"), ("share" if binary else "number"), _Mean(REWARD)
    sizes = [int(np.median(tasks.sizes[tasks.sizes > 0])) for tasks in (*first, *second) if (tasks.sizes > 0).any()]
    if sizes and (k := min(sizes)) > 1:
        yield (
            (f"pass@{k}", "share", _Tries(k, binary=True))
            if binary
            else (
                f"best of {k}",
                "number",
                _Tries(k, binary=False),
            )
        )
        yield "groups with signal", "share", _signal
    yield "turns", "number", _Mean(TURNS)
    yield "generated tokens", "number", _Mean(TOKENS[1])
    yield "time in generation", "seconds", _Mean(SECONDS[0])
    yield "time in environment", "seconds", _Mean(SECONDS[1])
    for reason, ending in FINISHED.items():
        if not ending.by_environment:
            yield ending.title, "share", _StopReason(reason)
    yield "failed", "share", _failed


def _joined(tasks: Sequence[Tasks], run: Aggregates, measure: Any) -> TaskValues:
    indexes = np.concatenate([part.indexes for part in tasks])
    values = np.concatenate([measure(part, run) for part in tasks])
    order = np.argsort(indexes, kind="stable")
    return TaskValues(indexes[order], values[order])
