"""What several locations hold of one run: every trajectory, failure and drop once, in whatever order they lie."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kuberoll_workers.collection import records
from kuberoll_workers.collection.aggregate_table import Frame, Table
from kuberoll_workers.collection.run_directory import RunManifest, RunRefused, differences
from kuberoll_workers.collection.run_files import RunFiles
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, RecordError, TrajectoryKey, TrajectoryRecord


class Failure(NamedTuple):
    """A trajectory that was given up; of several times the greatest counts, which is the latest attempt."""

    attempt: int
    environment: str
    kind: str
    stage: str
    cause: str


class Dropped(NamedTuple):
    """A trajectory that was not wanted; of several times the greatest counts, which got furthest."""

    turns: int
    generated_tokens: int
    attempt: int
    reward: float
    environment: str
    reason: str
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the locations hold.

    Attributes:
        manifest: Of the run; None where no location has one.
        frames: The finished trajectories, by environment.
        failures: Trajectories that were given up, and neither finished nor dropped later.
        dropped: Trajectories that were dropped and not finished later.
        duplicates: Lines passed over because another line of the same trajectory counts.
    """

    manifest: RunManifest | None
    frames: Mapping[str, Frame]
    stop_reasons: Sequence[str]
    failures: Mapping[TrajectoryKey, Failure]
    dropped: Mapping[TrajectoryKey, Dropped]
    duplicates: int
    _table: Table
    _shards: Sequence[tuple[RunFiles, str, int]]

    def again(self) -> Iterator[tuple[int, TrajectoryRecord]]:
        """The finished trajectories once more, with the ordinals that the frames name them by.

        Raises:
            RecordError: They are no longer those that were there.
        """
        ordinal = 0
        for run, shard, count in self._shards:
            end = ordinal + count
            for record in itertools.islice(records.trajectories(run.storage, shard), count):
                if record.key != self._table.key(ordinal):
                    break
                yield ordinal, record
                ordinal += 1
            if ordinal != end:
                raise RecordError(f"{run.storage.where(shard)}: changed while it was read; try again")


def read_contents(runs: Sequence[RunFiles]) -> Contents:
    """Read all locations; streamed, memory is some 100 bytes a trajectory.

    Raises:
        RunRefused: The locations are not of one run, or a manifest cannot be read.
        RecordError: A line is not what it should be, with file and line.
    """
    manifest = common_manifest(runs)
    table, shards = Table(), []
    for run in runs:
        for shard in run.storage.shards():
            before, where = len(table), run.storage.where(shard)
            for record in records.trajectories(run.storage, shard):
                table.add(record, where=where)
            shards.append((run, shard, len(table) - before))
    frames = table.frames()
    failures = _failures(itertools.chain.from_iterable(run.failures() for run in runs))
    dropped = _dropped(itertools.chain.from_iterable(run.dropped() for run in runs))
    for key in _finished(frames, {*failures, *dropped}):
        failures.pop(key, None)
        dropped.pop(key, None)
    for key in [key for key in failures if key in dropped and dropped[key].attempt > failures[key].attempt]:
        del failures[key]
    return Contents(
        manifest=manifest,
        frames=frames,
        stop_reasons=table.stop_reasons,
        failures=failures,
        dropped=dropped,
        duplicates=table.duplicates,
        _table=table,
        _shards=shards,
    )


def common_manifest(runs: Sequence[RunFiles]) -> RunManifest | None:
    """The one manifest that all locations share; None where none has one.

    Raises:
        RunRefused: They are of different runs, or only some have a manifest.
    """
    first, *others = runs
    manifest = first.manifest()
    for other in others:
        found = other.manifest()
        if (manifest is None) != (found is None):
            with_one, without = (first, other) if found is None else (other, first)
            raise RunRefused(
                f"{without.location} has no manifest.json and {with_one.location} has one, so nothing says that they "
                "are of one run: copy the run's manifest.json to both, or aggregate them one by one"
            )
        if manifest is None or found is None:
            continue
        # How many shards there are changes no trajectory.
        changed = differences(manifest, dataclasses.replace(found, shards=manifest.shards))
        if changed:
            lines = "\n  ".join(changed)
            raise RunRefused(
                f"{first.location} and {other.location} are different runs, whose trajectories must not be mixed:\n"
                f"  {lines}\nAggregate them one by one"
            )
    return manifest


def _failures(found: Iterator[FailureRecord]) -> dict[TrajectoryKey, Failure]:
    latest: dict[TrajectoryKey, Failure] = {}
    texts: dict[str, str] = {}
    for record in found:
        names = (record.task_name, record.kind, record.stage, record.cause)
        failure = Failure(record.attempt, *(texts.setdefault(name, name) for name in names))
        latest[record.key] = max(failure, latest.get(record.key, failure))
    return latest


def _dropped(found: Iterator[DroppedRecord]) -> dict[TrajectoryKey, Dropped]:
    furthest: dict[TrajectoryKey, Dropped] = {}
    texts: dict[str, str] = {}
    for record in found:
        dropped = Dropped(
            turns=record.turn_count,
            generated_tokens=record.tokens.generated,
            attempt=record.attempt,
            reward=record.total_reward,
            environment=texts.setdefault(record.task_name, record.task_name),
            reason=texts.setdefault(record.reason, record.reason),
            finished=record.stop_reason is not None,
        )
        furthest[record.key] = max(dropped, furthest.get(record.key, dropped))
    return furthest


def _finished(frames: Mapping[str, Frame], keys: Collection[TrajectoryKey]) -> set[TrajectoryKey]:
    """Those of the keys that have a finished trajectory."""
    tasks = np.array(sorted({key.task_index for key in keys}), dtype=np.int64)
    finished: set[TrajectoryKey] = set()
    for frame in frames.values():
        rows = np.flatnonzero(np.isin(frame.tasks, tasks))
        pairs = zip(frame.tasks[rows].tolist(), frame.rollouts[rows].tolist(), strict=True)
        finished.update(key for pair in pairs if (key := TrajectoryKey(*pair)) in keys)
    return finished
