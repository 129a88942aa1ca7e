"""Numbers of a run, computed from its files alone, as defined in docs/reference/aggregates.md."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from kuberoll_workers.analysis.aggregation.columns import MakeEnvironment, own_metrics, plain_metric
from kuberoll_workers.analysis.aggregation.environments import (
    EnvironmentSummary,
    GroupSize,
    Tasks,
    summarize,
    task_rows,
)
from kuberoll_workers.analysis.aggregation.sources import Contents, Dropped, Failure, read_contents
from kuberoll_workers.analysis.aggregation.table import REWARD, TOKENS, TURNS, Frame, Table
from kuberoll_workers.analysis.removal import Lengths, Removal, Removed, adjust, removal_of
from kuberoll_workers.data.record import TrajectoryKey
from kuberoll_workers.data.stop_reasons import ENDINGS, WHOLE_GROUP
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.run_directory import AGGREGATES, RunManifest
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.rollouts.drop_report import DropReport, TrajectoryTotals

__all__ = ["TASK_METRICS", "Aggregates", "EnvironmentSummary", "aggregate"]

TASK_METRICS = "task_metrics.jsonl"
_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregates:
    """Numbers of a run.

    Attributes:
        job: Name of the job; None without a manifest.
        summaries: Summary of each environment, in the job's order, then sorted by name those that the manifest does not
            name.
        tail: Comparison of kept and dropped trajectories.
        planned: Number of trajectories that the run will produce; None without a manifest, or if it stops at a number
            of groups.
        contents: The data that the numbers were computed from.
        tasks: Finished trajectories by task, for each environment.
        removals: What was removed, of environments of which something was.
    """

    job: str | None
    summaries: Mapping[str, EnvironmentSummary]
    tail: DropReport
    planned: int | None
    contents: Contents
    tasks: Mapping[str, Tasks]
    removals: Mapping[str, Removal]

    @property
    def trajectories(self) -> int:
        """Number of finished trajectories."""
        return sum(summary.trajectories for summary in self.summaries.values())

    @property
    def failed(self) -> int:
        """Number of trajectories that failed permanently."""
        return len(self.contents.failures)

    @property
    def unscored(self) -> int:
        """Number of those that only lack a score."""
        return sum(failure.unscored for failure in self.contents.failures.values())

    @property
    def duplicates(self) -> int:
        """Number of lines that do not count because another line of the same trajectory does."""
        return self.contents.duplicates

    @property
    def missing(self) -> int | None:
        """Number of planned trajectories that are neither finished nor given up with their group; None if unknown."""
        if self.planned is None:
            return None
        return max(0, self.planned - self.trajectories - self.tail.given_up)

    def encode(self) -> bytes:
        """Content of `aggregate_metrics.json`."""
        document = {
            "format": _FORMAT,
            "job": self.job,
            "trajectories": self.trajectories,
            "planned": self.planned,
            "missing": self.missing,
            "failed": self.failed,
            "unscored": self.unscored,
            "duplicates": self.duplicates,
            "environments": {name: self._environment(name) for name in self.summaries},
            "tail": self.tail.as_json() if self.tail.dropped else None,
        }
        # orjson writes non-finite numbers as null.
        options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        return orjson.dumps(document, default=plain_metric, option=options | orjson.OPT_APPEND_NEWLINE)

    def warnings(self) -> list[str]:
        """Lines about environments whose kept trajectories are biased by what was removed."""
        lines = (item.warning(name) for name, item in self.removals.items())
        return [line for line in lines if line]

    def _environment(self, name: str) -> dict[str, Any]:
        removal = self.removals.get(name)
        return {**self.summaries[name].as_json(), "removal": None if removal is None else removal.as_json()}

    def task_lines(self) -> Iterator[bytes]:
        """Lines of `task_metrics.jsonl`, computed on demand."""
        for name, tasks in self.tasks.items():
            success = self.summaries[name].success
            threshold = None if success is None else success.threshold
            for row in task_rows(tasks, environment=name, stop_reasons=self.contents.stop_reasons, threshold=threshold):
                yield orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)

    def write_beside(self, run: RunFiles) -> list[str]:
        """Write both files next to those of a run; returns their locations.

        If every task has a single trajectory, metrics by task would repeat the trajectories, and only the first file is
        written.
        """
        if all(len(summary.repeats) <= 1 for summary in self.summaries.values()):
            return [run.write(AGGREGATES, self.encode())]
        with tempfile.TemporaryDirectory(prefix="kuberoll-") as directory:
            tasks = Path(directory) / TASK_METRICS
            write_lines(tasks, self.task_lines())
            where = run.storage.upload(TASK_METRICS, tasks)
        return [run.write(AGGREGATES, self.encode()), where]


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write lines to a file, streamed."""
    with path.open("wb") as file:
        file.writelines(lines)


def aggregate(
    runs: Sequence[RunFiles],
    *,
    make: MakeEnvironment | None = None,
    environments: Sequence[str] = (),
    threshold: float | None = None,
    observe: Callable[[EndedRecord], None] | None = None,
) -> Aggregates:
    """Compute the numbers of one run.

    Memory: about 100 bytes per trajectory, and the columns that environments read.

    Args:
        runs: The run: one location, or several that hold parts of it.
        make: Creates an environment, for its own metrics; None to skip them.
        environments: Names of environments that are reported even without trajectories, in order; empty for those of
            the manifest.
        threshold: Minimum reward of a success. None: 1 if all rewards are 0 or 1; otherwise success is undefined, and k
            tries are measured by their rewards.
        observe: Called with each trajectory as it is read, which saves other consumers another pass.

    Raises:
        RunRefused: The locations belong to different runs, or a manifest cannot be read.
        RecordError: A shard's Parquet file is invalid, or two environments have trajectories of the same task.
    """
    contents = read_contents(runs, observe=observe)
    manifest = contents.manifest
    found = {
        *contents.frames,
        *(failure.environment for failure in contents.failures.values()),
        *(dropped.environment for dropped in contents.dropped.values()),
    }
    named = [*environments] or _environments(manifest)
    names = [*named, *sorted(found - set(named))]
    groups = _groups(manifest)
    tasks, summaries, removals = {}, {}, {}
    for name in names:
        failures = {key: failure for key, failure in contents.failures.items() if failure.environment == name}
        tasks[name] = _tasks(contents.frames.get(name), failures, groups.get(name))
        summaries[name] = summarize(
            tasks[name],
            stop_reasons=contents.stop_reasons,
            threshold=threshold,
            failures=Counter(f"{item.kind} ({item.stage}): {item.cause}" for item in failures.values()),
            dropped=Counter(item.reason for item in contents.dropped.values() if item.environment == name),
        )
        if (removal := _removal(tasks[name].frame, _removed(name, failures, contents.dropped))) is not None:
            removals[name] = removal
    if make is not None:
        for name, metrics in own_metrics(contents, make).items():
            summaries[name].metrics = metrics
    return Aggregates(
        job=None if manifest is None else manifest.job,
        summaries=summaries,
        tail=_tail(summaries.values(), contents),
        planned=_planned(manifest),
        contents=contents,
        tasks=tasks,
        removals=adjust(removals),
    )


def _tasks(frame: Frame | None, failures: Mapping[TrajectoryKey, Failure], group: GroupSize | None) -> Tasks:
    return Tasks(
        _empty() if frame is None else frame,
        np.array([key.task_index for key in failures], dtype=np.int64),
        np.array([key.rollout_index for key in failures], dtype=np.int64),
        group,
    )


def _removed(
    name: str, failures: Mapping[TrajectoryKey, Failure], dropped: Mapping[TrajectoryKey, Dropped]
) -> list[Removed]:
    """What was removed from an environment's trajectories; filtered groups have no advantage that could be missed."""
    failed = [
        Removed(
            task=key.task_index,
            reason=item.reason or item.kind,
            kind=item.kind,
            turns=item.turns,
            tokens=item.generated_tokens,
            with_group=item.stage == "group",
        )
        for key, item in failures.items()
    ]
    return failed + [
        Removed(
            task=key.task_index,
            reason=item.reason,
            kind="dropped",
            turns=item.turns + (not item.finished),
            tokens=item.generated_tokens,
            with_group=item.reason in WHOLE_GROUP,
        )
        for key, item in dropped.items()
        if item.environment == name and not ENDINGS[item.reason].by_rewards
    ]


def _removal(frame: Frame, removed: Sequence[Removed]) -> Removal | None:
    column = {name: frame.columns[name].values for name in (TURNS, TOKENS[1], REWARD)}
    kept = Lengths(tasks=frame.tasks, turns=column[TURNS].astype(np.int64), tokens=column[TOKENS[1]])
    return removal_of(kept, column[REWARD], removed)


def _empty() -> Frame:
    table = Table()
    table.environments.append("")
    return table.frames()[""]


def _environments(manifest: RunManifest | None) -> list[str]:
    if manifest is None:
        return []
    return [manifest.identity[f"environments[{number}].name"] for number in range(_environment_count(manifest))]


def _environment_count(manifest: RunManifest) -> int:
    return sum(key.startswith("environments[") and key.endswith("].name") for key in manifest.identity)


def _groups(manifest: RunManifest | None) -> dict[str, GroupSize]:
    """Group sizes by environment, from the manifest; empty without one."""
    groups: dict[str, GroupSize] = {}
    if manifest is None:
        return groups
    identity = manifest.identity
    for place, name in enumerate(_environments(manifest)):
        own = identity.get(f"environments[{place}].repeats")
        repeats = identity.get("dataset.repeats") if own is None else own
        if repeats is not None:
            oversample = identity.get("rollout.groups.oversample") or 0
            groups[name] = GroupSize(repeats=repeats, begun=repeats + oversample)
    return groups


def _planned(manifest: RunManifest | None) -> int | None:
    if manifest is None or manifest.identity.get("rollout.groups.wanted") is not None:
        return None
    planned: int | None = manifest.inputs.get("trajectories")
    return planned


def _tail(summaries: Iterable[EnvironmentSummary], contents: Contents) -> DropReport:
    report = DropReport()
    kept = list(summaries)
    report.kept.trajectories = sum(summary.trajectories for summary in kept)
    report.kept.turns = sum(summary.turns for summary in kept)
    report.kept.generated_tokens = sum(summary.generated_tokens for summary in kept)
    report.kept.reward = math.fsum(summary.reward for summary in kept)
    for reason in sorted({item.reason for item in contents.dropped.values()}):
        lot = [item for item in contents.dropped.values() if item.reason == reason]
        report.dropped[reason] = _lot(lot)
    report.unfinished = sum(not item.finished for item in contents.dropped.values())
    return report


def _lot(dropped: Sequence[Dropped]) -> TrajectoryTotals:
    return TrajectoryTotals(
        trajectories=len(dropped),
        turns=sum(item.turns for item in dropped),
        generated_tokens=sum(item.generated_tokens for item in dropped),
        reward=math.fsum(item.reward for item in dropped),
    )
