"""Comparison of two runs from their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kuberoll_workers.analysis.aggregation.aggregates import Aggregates, aggregate
from kuberoll_workers.analysis.aggregation.table import REWARD
from kuberoll_workers.analysis.comparison.metrics import Metric, environment_metrics, reward_by_task
from kuberoll_workers.analysis.comparison.settings import Settings, compare_settings
from kuberoll_workers.analysis.report.make import own_texts
from kuberoll_workers.analysis.report.spread import merged_points
from kuberoll_workers.analysis.report.throughput import Throughput
from kuberoll_workers.analysis.report.token_texts import TokenTexts
from kuberoll_workers.analysis.report.trajectory_sample import MOST, MOST_BYTES, ReadableTrajectory, TrajectorySample
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.run_files import RunFiles

MOST_TASKS = 100
"""Maximum number of tasks that are listed as better, and of those as worse."""
_MOST_ROLLOUTS = 32


class NotComparable(ValueError):
    """The runs have nothing in common that could be compared; the message says what each of them has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTask:
    """A task whose mean reward differs.

    Attributes:
        first, second: Mean rewards.
        rollouts: Rollout indexes with their rewards, of each run; at most 32.
    """

    task: int
    environment: str
    first: float
    second: float
    rollouts: tuple[list[tuple[int, float]], list[tuple[int, float]]]

    @property
    def difference(self) -> float:
        return self.second - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChanges:
    """Tasks that both runs have, by their mean reward.

    Attributes:
        better, worse, equal: Number of tasks whose reward is greater, less, or the same in the second run.
        listed: Those with the greatest differences: at most 100 better and 100 worse ones.
        points: `(first, second, tasks)`: mean rewards, and the number of tasks that have them.
    """

    better: int
    worse: int
    equal: int
    listed: list[ChangedTask]
    points: list[tuple[float, float, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentComparison:
    """Comparison of an environment, or of all that both runs have; its name is empty then.

    Attributes:
        changes: None if tasks are not paired.
    """

    name: str
    metrics: list[Metric]
    changes: TaskChanges | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of the runs A and B.

    Attributes:
        runs: Location, job, time of creation, counts and throughput of each run.
        environments: All together if there are several, then each.
        browsed: Trajectories to read, of each run: those of the listed tasks, or a sample.
        offered: Number of trajectories of both runs.
    """

    runs: tuple[dict[str, Any], dict[str, Any]]
    settings: Settings
    environments: list[EnvironmentComparison]
    browsed: tuple[Sequence[ReadableTrajectory], Sequence[ReadableTrajectory]]
    offered: int


def compare_runs(first: RunFiles, second: RunFiles, *, texts: TokenTexts | None = None) -> Comparison:
    """Compare two runs; memory is that of two reports.

    Args:
        texts: Texts of tokens; None: those of each run's own tokenizer if it is on this machine.

    Raises:
        NotComparable: They are the same files, or share no environment in which both finished a trajectory.
        RecordError: A shard's Parquet file is invalid, or two environments have trajectories of the same task.
        RunRefused: A manifest cannot be read.
    """
    if first.location.rstrip("/") == second.location.rstrip("/"):
        raise NotComparable(f"{first.location} twice: give two different runs")
    throughputs = Throughput(), Throughput()
    one, two = (
        aggregate([files], observe=_finished(throughput.add))
        for files, throughput in zip((first, second), throughputs, strict=True)
    )
    settings = compare_settings(one.contents.manifest, two.contents.manifest)
    names = _common_environments(first, one, second, two)
    for letter, run in (("A", one), ("B", two)):
        if others := [name for name, summary in run.summaries.items() if summary.trajectories and name not in names]:
            settings.notes.append(f"only {letter} has trajectories of {', '.join(others)}: they are not compared")
    groups = [names] if len(names) == 1 else [names, *([name] for name in names)]
    environments = [
        EnvironmentComparison(
            name=group[0] if len(group) == 1 else "",
            metrics=environment_metrics(one, two, group, paired=settings.same_tasks),
            changes=_changes(one, two, group) if settings.same_tasks else None,
        )
        for group in groups
    ]
    listed = {task.task for part in environments if part.changes for task in part.changes.listed}
    return Comparison(
        runs=(_head(first, one, throughputs[0]), _head(second, two, throughputs[1])),
        settings=settings,
        environments=environments,
        browsed=(_browsed(first, listed, texts), _browsed(second, listed, texts)),
        offered=sum(run.trajectories + run.failed + len(run.contents.dropped) for run in (one, two)),
    )


def _common_environments(first: RunFiles, one: Aggregates, second: RunFiles, two: Aggregates) -> list[str]:
    have = [[name for name, summary in run.summaries.items() if summary.trajectories] for run in (one, two)]
    for files, names in ((first, have[0]), (second, have[1])):
        if not names:
            raise NotComparable(f"{files.location} has no finished trajectory")
    common = [name for name in have[0] if name in have[1]]
    if not common:
        raise NotComparable(
            f"the runs share no environment: {first.location} has {', '.join(have[0])}; "
            f"{second.location} has {', '.join(have[1])}"
        )
    return common


def _finished(observe: Callable[[TrajectoryRecord], None]) -> Callable[[EndedRecord], None]:
    def each(record: EndedRecord) -> None:
        if isinstance(record, TrajectoryRecord):
            observe(record)

    return each


def _head(files: RunFiles, run: Aggregates, throughput: Throughput) -> dict[str, Any]:
    manifest = run.contents.manifest
    return {
        "location": files.location,
        "job": run.job,
        "created": None if manifest is None else manifest.created,
        "finished": run.trajectories,
        "failed": run.failed,
        "tokens_per_second": throughput.tokens_per_second(),
    }


def _changes(one: Aggregates, two: Aggregates, environments: Sequence[str]) -> TaskChanges:
    rewards = [reward_by_task([run.tasks[name] for name in environments], run).finite for run in (one, two)]
    tasks, places, others = np.intersect1d(rewards[0].tasks, rewards[1].tasks, assume_unique=True, return_indices=True)
    first, second = rewards[0].values[places], rewards[1].values[others]
    difference = second - first
    order = np.lexsort((tasks, -np.abs(difference)))
    chosen = [
        *[place for place in order if difference[place] > 0][:MOST_TASKS],
        *[place for place in order if difference[place] < 0][:MOST_TASKS],
    ]
    rollouts = [dict(_rollouts(run, environments, {int(tasks[place]) for place in chosen})) for run in (one, two)]
    listed = []
    for place in chosen:
        task = int(tasks[place])
        (environment, mine), (_, theirs) = rollouts[0][task], rollouts[1][task]
        listed.append(
            ChangedTask(
                task=task,
                environment=environment,
                first=float(first[place]),
                second=float(second[place]),
                rollouts=(mine, theirs),
            )
        )
    return TaskChanges(
        better=int((difference > 0).sum()),
        worse=int((difference < 0).sum()),
        equal=int((difference == 0).sum()),
        listed=listed,
        points=merged_points(first.tolist(), second.tolist()),
    )


def _rollouts(
    run: Aggregates, environments: Sequence[str], wanted: set[int]
) -> Iterator[tuple[int, tuple[str, list[tuple[int, float]]]]]:
    for name in environments:
        tasks = run.tasks[name]
        rewards = tasks.frame.columns[REWARD].values
        for place, task in enumerate(tasks.indexes.tolist()):
            if task in wanted:
                rows = slice(tasks.starts[place], min(tasks.starts[place + 1], tasks.starts[place] + _MOST_ROLLOUTS))
                yield (
                    task,
                    (
                        name,
                        list(zip(tasks.frame.rollouts[rows].tolist(), rewards[rows].tolist(), strict=True)),
                    ),
                )


def _browsed(files: RunFiles, tasks: set[int], texts: TokenTexts | None) -> Sequence[ReadableTrajectory]:
    """Trajectories of these tasks, or of all tasks if there are none; half of what a report has room for."""
    sample = TrajectorySample(most=MOST // 2, most_bytes=MOST_BYTES // 2, texts=texts or own_texts(files))
    for record in files.read():
        if not tasks or record.task_index in tasks:
            sample.offer(record)
    return sample.items()
