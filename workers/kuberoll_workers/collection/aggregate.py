"""The numbers of a run, computed from its files alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from kuberoll_workers.collection.journal import DROPPED, FAILURES, read_dropped, read_failures, read_trajectories
from kuberoll_workers.data.record import FailureRecord, TrajectoryKey, TrajectoryRecord
from kuberoll_workers.environments.interface import EnvironmentInterface
from kuberoll_workers.rollouts.tail import TailReport


@dataclass(slots=True)
class EnvironmentSummary:
    """What one environment's trajectories came to.

    Attributes:
        failures: Trajectories given up and not finished later, by cause.
        metrics: The environment's own.
    """

    trajectories: int = 0
    reward_sum: float = 0.0
    reward_min: float | None = None
    reward_max: float | None = None
    turns: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    environment_tokens: int = 0
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0
    stop_reasons: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def mean_reward(self) -> float | None:
        """Mean total reward; None without trajectories."""
        return self.reward_sum / self.trajectories if self.trajectories else None

    @property
    def failed(self) -> int:
        return self.failures.total()

    def add(self, record: TrajectoryRecord) -> None:
        """Count one finished trajectory."""
        reward = record.total_reward
        self.trajectories += 1
        self.reward_sum += reward
        self.reward_min = reward if self.reward_min is None else min(self.reward_min, reward)
        self.reward_max = reward if self.reward_max is None else max(self.reward_max, reward)
        self.turns += record.turn_count
        self.prompt_tokens += record.tokens.prompt
        self.generated_tokens += record.tokens.generated
        self.environment_tokens += record.tokens.environment
        self.generation_seconds += sum(record.timing.generation_seconds)
        self.environment_seconds += sum(record.timing.environment_seconds)
        self.stop_reasons[record.stop_reason] += 1

    def as_json(self) -> dict[str, Any]:
        """The form in which it is stored."""
        count = self.trajectories
        return {
            "trajectories": count,
            "failed": self.failed,
            "reward": {"mean": self.mean_reward, "min": self.reward_min, "max": self.reward_max},
            "turns": {"total": self.turns, "mean": self.turns / count if count else None},
            "tokens": {
                "prompt": self.prompt_tokens,
                "generated": self.generated_tokens,
                "environment": self.environment_tokens,
            },
            "seconds": {"generation": self.generation_seconds, "environment": self.environment_seconds},
            "stop_reasons": dict(sorted(self.stop_reasons.items())),
            "failures": dict(sorted(self.failures.items())),
            "environment_metrics": self.metrics,
        }


def summarize(
    directory: Path, environments: Iterable[str], make: Callable[[str], EnvironmentInterface]
) -> dict[str, EnvironmentSummary]:
    """Summaries of a run by environment, in the job's order.

    Args:
        directory: The run's output.
        environments: The names of the job's environments.
        make: Makes one of them, for its own `global_post_process_and_metrics`.

    Raises:
        RecordError: A file holds something else than trajectories.
    """
    summaries = {name: EnvironmentSummary() for name in environments}
    columns: dict[str, dict[str, list[Any]]] = {name: {} for name in summaries}
    finished: set[TrajectoryKey] = set()
    for shard in sorted(directory.glob("shard-*.jsonl")):
        for record in read_trajectories(shard):
            if record.key in finished:
                continue
            finished.add(record.key)
            summaries[record.task_name].add(record)
            _add_row(columns[record.task_name], record)
    failures: dict[TrajectoryKey, FailureRecord] = {}
    for failure in read_failures(directory / FAILURES):
        if failure.key not in finished:
            failures[failure.key] = failure
    for failure in failures.values():
        summaries[failure.task_name].failures[f"{failure.kind} ({failure.stage}): {failure.cause}"] += 1
    for name, summary in summaries.items():
        if summary.trajectories:
            summary.metrics = _own_metrics(make, name, columns[name])
    return summaries


def tail_report(directory: Path, summaries: Iterable[EnvironmentSummary]) -> TailReport:
    """Kept against dropped trajectories of a run.

    Args:
        summaries: Of the trajectories that are kept.

    Raises:
        RecordError: The file of dropped ones holds something else.
    """
    report = TailReport()
    for summary in summaries:
        report.kept.trajectories += summary.trajectories
        report.kept.turns += summary.turns
        report.kept.generated_tokens += summary.generated_tokens
        report.kept.reward += summary.reward_sum
    for dropped in read_dropped(directory / DROPPED):
        report.add(dropped)
    return report


def _own_metrics(
    make: Callable[[str], EnvironmentInterface], name: str, columns: dict[str, list[Any]]
) -> dict[str, Any]:
    """What an environment says of its trajectories; where its code fails, that, and the other numbers stay."""
    try:
        return dict(make(name).global_post_process_and_metrics(columns)[1])
    except Exception as error:
        return {"error": f"global_post_process_and_metrics raised {type(error).__name__}: {error}"}


def _add_row(columns: dict[str, list[Any]], record: TrajectoryRecord) -> None:
    row = {
        "message_log": [{"role": message.role, "content": message.content} for message in record.messages],
        "extra_env_info": record.metadata,
        "task_name": record.task_name,
        "task_index": record.task_index,
        "idx": record.idx,
        "total_reward": record.total_reward,
        "stop_reason": record.stop_reason,
        "turn_count": record.turn_count,
    }
    for name, value in row.items():
        columns.setdefault(name, []).append(value)


def encode_summaries(job: str, summaries: dict[str, EnvironmentSummary], tail: TailReport) -> bytes:
    """The contents of `aggregate_metrics.json`; `tail` is in it where something was dropped."""
    document = {
        "format": 1,
        "job": job,
        "environments": {name: summary.as_json() for name, summary in summaries.items()},
        **({"tail": tail.as_json()} if tail.dropped else {}),
    }
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(document, default=_plain, option=options)


def _plain(value: Any) -> Any:
    """A metric of any library as JSON: tensors as numbers or lists, anything else by its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
