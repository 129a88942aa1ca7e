"""Numbers of an environment, from its columns, as defined in docs/reference/aggregates.md."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kuberoll_workers.analysis.aggregation.table import REWARD, SECONDS, TOKENS, TURNS, Column, Frame
from kuberoll_workers.analysis.statistics import (
    Floats,
    GroupStatistics,
    Integers,
    RunMean,
    best_of_k,
    describe,
    describe_groups,
    majority_at_k,
    pass_at_k,
    run_mean,
    run_share,
    tries,
)
from kuberoll_workers.data.tracebacks import Traceback

_TASKS_AT_ONCE = 4096
_MOST_REPEATS = 1024
_MOST_CAUSES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSize:
    """Size of prompt groups: `begun` samples are started, and `repeats` are kept."""

    repeats: int
    begun: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Success:
    """Results of k tries.

    Attributes:
        threshold: Minimum reward of a success; all numbers are percentages. None: all numbers are rewards.
        pass_at_k: Value by k.
        majority_at_k: Value by k; None if no trajectory has an answer.
        runs: Mean over the repeats that every task has.
        no_answer: Percentage of trajectories without an answer, over the same repeats; None if none has one.
    """

    threshold: float | None
    pass_at_k: dict[int, float]
    majority_at_k: dict[int, float] | None
    runs: RunMean
    no_answer: RunMean | None

    def as_json(self) -> dict[str, Any]:
        """Form in which it is stored."""
        votes = self.majority_at_k
        return {
            "unit": "reward" if self.threshold is None else "percent",
            "threshold": self.threshold,
            "pass_at_k": {str(k): value for k, value in self.pass_at_k.items()},
            "majority_at_k": None if votes is None else {str(k): value for k, value in votes.items()},
            "avg_of_n": self.runs._asdict(),
            "no_answer": None if self.no_answer is None else self.no_answer._asdict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsFailure:
    """Why an environment's own metrics are missing, with the traceback of its code."""

    error: str
    traceback: Traceback | None = None

    def as_json(self) -> dict[str, Any]:
        """Form in which it is stored."""
        return {"error": self.error, **({} if self.traceback is None else {"traceback": self.traceback.text})}


@dataclass(slots=True, kw_only=True)
class EnvironmentSummary:
    """Results of one environment.

    Attributes:
        tasks: Number of tasks with trajectories that finished or failed permanently.
        expected: Number of trajectories that these tasks' groups should have; None without a manifest.
        missing: Number of expected trajectories that did not finish.
        failures: Number of trajectories that failed permanently, by cause.
        dropped: Number of dropped trajectories, by reason.
        groups, equal_groups: Number of tasks with at least two rewards, and of those whose rewards are all equal.
        fields: Statistics of each numeric field, by name.
        repeats: Statistics of the total reward, one row per repeat.
        across_repeats: Mean of the repeats' means; a share of successes if all rewards are 0 or 1.
        metrics: The environment's own metrics, or why they are missing; None if they were not computed.
    """

    trajectories: int
    tasks: int
    expected: int | None
    missing: int | None
    turns: int
    prompt_tokens: int
    generated_tokens: int
    environment_tokens: int
    generation_seconds: float
    environment_seconds: float
    reward: float
    mean_reward: float | None
    groups: int
    equal_groups: int
    stop_reasons: Counter[str]
    failures: Counter[str]
    dropped: Counter[str]
    fields: dict[str, dict[str, Any]]
    repeats: list[dict[str, Any]]
    across_repeats: RunMean
    success: Success | None
    metrics: dict[str, Any] | MetricsFailure | None = None

    @property
    def failed(self) -> int:
        return self.failures.total()

    def as_json(self) -> dict[str, Any]:
        """Form in which it is stored."""
        metrics = self.metrics
        by_count = sorted(self.failures.items(), key=lambda item: (-item[1], item[0]))
        shown = by_count[:_MOST_CAUSES]
        return {
            "trajectories": self.trajectories,
            "tasks": self.tasks,
            "expected": self.expected,
            "missing": self.missing,
            "failed": self.failed,
            "failures": dict(shown),
            "failures_of_other_causes": self.failed - sum(count for _, count in shown),
            "dropped": dict(sorted(self.dropped.items())),
            "stop_reasons": dict(sorted(self.stop_reasons.items())),
            "totals": {
                "turns": self.turns,
                "tokens": {
                    "prompt": self.prompt_tokens,
                    "generated": self.generated_tokens,
                    "environment": self.environment_tokens,
                    "total": self.prompt_tokens + self.generated_tokens + self.environment_tokens,
                },
                "seconds": {"generation": self.generation_seconds, "environment": self.environment_seconds},
            },
            "groups": {
                "count": self.groups,
                "equal_rewards": self.equal_groups,
                "equal_rewards_share": self.equal_groups / self.groups if self.groups else None,
            },
            "success": None if self.success is None else self.success.as_json(),
            "across_repeats": self.across_repeats._asdict(),
            "repeats": self.repeats[:_MOST_REPEATS],
            "fields": self.fields,
            "environment_metrics": metrics.as_json() if isinstance(metrics, MetricsFailure) else metrics,
        }


class Tasks:
    """Tasks of an environment: those with trajectories that finished or failed permanently."""

    def __init__(self, frame: Frame, failed: Integers, failed_rollouts: Integers, group: GroupSize | None) -> None:
        """Number the tasks by their index.

        Args:
            failed, failed_rollouts: Task and rollout index of each failure.
            group: Size of groups, from the manifest; None without one.
        """
        self.frame = frame
        self.indexes = np.unique(np.concatenate([frame.tasks, failed]))
        # Start of each task's trajectories, and the end of the last one's.
        self.starts = np.append(np.searchsorted(frame.tasks, self.indexes), len(frame.tasks))
        self.sizes = np.diff(self.starts)
        self.of_row = np.searchsorted(self.indexes, frame.tasks)
        self.failed = np.bincount(np.searchsorted(self.indexes, failed), minlength=len(self.indexes))
        self.expected: Integers | None = None
        if group is not None:
            tasks = np.concatenate([self.of_row, np.searchsorted(self.indexes, failed)])
            # Equal rows of a dataset are one task, whose groups are numbered consecutively.
            numbers = np.concatenate([frame.rollouts, failed_rollouts]) // group.begun
            order = np.lexsort((numbers, tasks))
            tasks, numbers = tasks[order], numbers[order]
            first = np.ones(len(tasks), dtype=bool)
            first[1:] = (np.diff(tasks) != 0) | (np.diff(numbers) != 0)
            self.expected = np.bincount(tasks[first], minlength=len(self.indexes)) * group.repeats


def summarize(
    tasks: Tasks, *, stop_reasons: Sequence[str], threshold: float | None, failures: Counter[str], dropped: Counter[str]
) -> EnvironmentSummary:
    """Compute the numbers of an environment, without its own metrics.

    Args:
        stop_reasons: Names of the frame's stop reasons, by number.
        threshold: Minimum reward of a success; None: 1 if all rewards are 0 or 1, otherwise undefined.
    """
    frame = tasks.frame
    rewards = frame.columns[REWARD].values
    by_task = describe_groups(rewards, tasks.of_row, len(tasks.indexes))
    several = by_task.count > 1
    totals = {name: math.fsum(_finite(frame.columns[name].values).tolist()) for name in (TURNS, *TOKENS, *SECONDS)}
    repeats = describe_groups(rewards, _ranks(tasks), int(tasks.sizes.max(initial=0)))
    return EnvironmentSummary(
        trajectories=len(frame.tasks),
        tasks=len(tasks.indexes),
        expected=int(tasks.expected.sum()) if tasks.expected is not None else None,
        missing=int(missing(tasks).sum()) if tasks.expected is not None else None,
        turns=int(totals[TURNS]),
        prompt_tokens=int(totals[TOKENS[0]]),
        generated_tokens=int(totals[TOKENS[1]]),
        environment_tokens=int(totals[TOKENS[2]]),
        generation_seconds=totals[SECONDS[0]],
        environment_seconds=totals[SECONDS[1]],
        reward=math.fsum(_finite(rewards).tolist()),
        mean_reward=number(describe(rewards).mean[0]),
        groups=int(several.sum()),
        equal_groups=int((several & (by_task.minimum == by_task.maximum)).sum()),
        stop_reasons=_count(frame.stop_reasons, stop_reasons),
        failures=failures,
        dropped=dropped,
        fields={
            name: statistics_of(describe(column.values), 0, of=len(frame.tasks))
            for name, column in frame.columns.items()
        },
        repeats=list(_repeats(repeats, len(tasks.indexes))),
        across_repeats=_across(_finite(repeats.mean).tolist(), _finite(rewards)),
        success=_success(tasks, threshold) if np.isfinite(rewards).any() else None,
    )


def missing(tasks: Tasks) -> Integers:
    """Number of expected trajectories of each task that did not finish, including failures."""
    assert tasks.expected is not None
    return np.maximum(tasks.expected - tasks.sizes, 0)


def task_rows(
    tasks: Tasks, *, environment: str, stop_reasons: Sequence[str], threshold: float | None
) -> Iterator[dict[str, Any]]:
    """Rows of `task_metrics.jsonl`, sorted by task; computed on demand.

    Args:
        threshold: `Success.threshold` of the environment.
    """
    for first in range(0, len(tasks.indexes), _TASKS_AT_ONCE):
        last = min(first + _TASKS_AT_ONCE, len(tasks.indexes))
        begin, end = int(tasks.starts[first]), int(tasks.starts[last])
        columns = {
            name: (column, describe_groups(column.values, tasks.of_row[begin:end][column.rows] - first, last - first))
            for name, whole in tasks.frame.columns.items()
            if (column := _part(whole, begin, end)).values.size
        }
        scores = _scores(tasks.frame.columns[REWARD].values[begin:end], threshold)
        lacking = missing(tasks) if tasks.expected is not None else None
        for task in range(first, last):
            size = int(tasks.sizes[task])
            rows = slice(int(tasks.starts[task]), int(tasks.starts[task + 1]))
            own = scores[rows.start - begin : rows.stop - begin]
            finite = np.isfinite(own)
            answers = tasks.frame.answers[rows][finite].tolist()
            own = own[finite]
            reward = columns[REWARD][1] if REWARD in columns else None
            yield {
                "environment": environment,
                "task_index": int(tasks.indexes[task]),
                "trajectories": size,
                "expected": None if tasks.expected is None else int(tasks.expected[task]),
                "missing": None if lacking is None else int(lacking[task]),
                "failed": int(tasks.failed[task]),
                "stop_reasons": dict(sorted(_count(tasks.frame.stop_reasons[rows], stop_reasons).items())),
                "equal_rewards": None
                if reward is None or reward.count[task - first] < 2
                else bool(reward.minimum[task - first] == reward.maximum[task - first]),
                "pass_at_k": {str(k): _tries(np.sort(own), k, percent=threshold is not None) for k in tries(len(own))},
                "majority_at_k": {
                    str(k): majority_at_k(answers, own.tolist(), k) * (1 if threshold is None else 100)
                    for k in tries(len(own))
                }
                if any(answers)
                else None,
                "fields": {
                    name: statistics_of(found, task - first, of=size)
                    for name, (_, found) in columns.items()
                    if found.count[task - first] or found.nonfinite[task - first]
                },
            }


def statistics_of(found: GroupStatistics, group: int, *, of: int) -> dict[str, Any]:
    """Statistics of a field in their stored form; None for missing values.

    Args:
        of: Number of trajectories, of which some may lack the field.
    """
    count, nonfinite = int(found.count[group]), int(found.nonfinite[group])
    return {
        "count": count,
        "missing": of - count - nonfinite,
        "nonfinite": nonfinite,
        "mean": number(found.mean[group]),
        "std": number(found.std[group]),
        "min": number(found.minimum[group]),
        "median": number(found.median[group]),
        "max": number(found.maximum[group]),
    }


def number(value: Any) -> float | None:
    """A float for JSON, which has no NaN and no infinity: None instead."""
    return float(value) if math.isfinite(value) else None


def _repeats(found: GroupStatistics, tasks: int) -> Iterator[dict[str, Any]]:
    for repeat in range(len(found.count)):
        count, std = int(found.count[repeat]), number(found.std[repeat])
        yield {
            "repeat": repeat,
            "count": count,
            "missing": tasks - count,
            "mean": number(found.mean[repeat]),
            "std": std,
            "standard_error": None if std is None else std / math.sqrt(count),
            "min": number(found.minimum[repeat]),
            "p25": number(found.p25[repeat]),
            "median": number(found.median[repeat]),
            "p75": number(found.p75[repeat]),
            "max": number(found.maximum[repeat]),
        }


def _success(tasks: Tasks, threshold: float | None) -> Success:
    frame = tasks.frame
    rewards = frame.columns[REWARD].values
    finite = np.isfinite(rewards)
    if threshold is None and _binary(rewards[finite]):
        threshold = 1.0
    scores = _scores(rewards[finite], threshold)
    answers = frame.answers[finite]
    # Start and number of each task's scores; tasks without scores are left out.
    _, starts, sizes = np.unique(tasks.of_row[finite], return_index=True, return_counts=True)
    least = int(sizes.min())
    percent = 1 if threshold is None else 100
    passes = {k: array("d") for k in tries(least)}
    votes = {k: array("d") for k in tries(least)}
    answered = bool(answers.any())
    for start, end in zip(starts, starts + sizes, strict=True):
        ascending = np.sort(scores[start:end])
        for k, values in passes.items():
            values.append(_tries(ascending, k, percent=threshold is not None))
        if answered:
            own = answers[start:end].tolist()
            given = scores[start:end].tolist()
            for k, values in votes.items():
                values.append(majority_at_k(own, given, k) * percent)
    runs = [percent * math.fsum(scores[starts + run].tolist()) / len(starts) for run in range(least)]
    lacking = [100 * int((answers[starts + run] == 0).sum()) / len(starts) for run in range(least)]
    return Success(
        threshold=threshold,
        pass_at_k={k: _mean(values) for k, values in passes.items()},
        majority_at_k={k: _mean(values) for k, values in votes.items()} if answered else None,
        runs=run_mean(runs) if threshold is None else run_share(runs, least * len(starts), whole=100),
        no_answer=run_share(lacking, least * len(starts), whole=100) if answered else None,
    )


def _across(means: Sequence[float], rewards: Floats) -> RunMean:
    return run_share(means, len(rewards)) if _binary(rewards) else run_mean(means)


def _binary(rewards: Floats) -> bool:
    """True if all of these finite rewards are 0 or 1."""
    return bool(np.isin(rewards, (0.0, 1.0)).all())


def _tries(ascending: Floats, k: int, *, percent: bool) -> float:
    if percent:
        return 100 * pass_at_k(len(ascending), int(ascending.sum()), k)
    return best_of_k(ascending, k)


def _scores(rewards: Floats, threshold: float | None) -> Floats:
    """Score of each trajectory: 0 or 1 if success is defined, else its reward; NaN stays NaN."""
    if threshold is None:
        return rewards
    return np.where(np.isfinite(rewards), (rewards >= threshold).astype(np.float64), np.nan)


def _ranks(tasks: Tasks) -> Integers:
    """Position of each trajectory within its task, from 0, by rollout index."""
    ranks: Integers = np.arange(len(tasks.of_row)) - tasks.starts[tasks.of_row]
    return ranks


def _part(column: Column, begin: int, end: int) -> Column:
    low, high = np.searchsorted(column.rows, [begin, end])
    return Column(rows=column.rows[low:high] - begin, values=column.values[low:high])


def _count(numbers: Integers, names: Sequence[str]) -> Counter[str]:
    counts = np.bincount(numbers, minlength=len(names)).tolist()
    return Counter({name: count for name, count in zip(names, counts, strict=True) if count})


def _finite(values: Floats) -> Floats:
    found: Floats = values[np.isfinite(values)]
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
