"""The contents of a run, in one location or several, as columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kuberoll_workers.analysis.aggregation.table import Frame, Table, several_environments
from kuberoll_workers.data.record import FailureRecord, RecordError, TrajectoryKey, TrajectoryRecord
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.run_directory import RunManifest, RunRefused, differences
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.trajectories import Trajectories


class Failure(NamedTuple):
    """A trajectory that was given up."""

    environment: str
    kind: str
    stage: str
    cause: str


class Dropped(NamedTuple):
    """A trajectory that was not wanted."""

    turns: int
    generated_tokens: int
    reward: float
    environment: str
    reason: str
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the locations hold: each trajectory once, in one of `frames`, `failures` and `dropped`.

    Attributes:
        manifest: Of the run; None where no location has one.
        frames: The finished trajectories, by environment.
        failures: Trajectories that were given up.
        dropped: Trajectories that were not wanted.
        duplicates: Lines passed over because another line of the same trajectory counts.
    """

    manifest: RunManifest | None
    frames: Mapping[str, Frame]
    stop_reasons: Sequence[str]
    failures: Mapping[TrajectoryKey, Failure]
    dropped: Mapping[TrajectoryKey, Dropped]
    duplicates: int
    _table: Table
    _trajectories: Trajectories

    def again(self) -> Iterator[tuple[int, TrajectoryRecord]]:
        """The finished trajectories once more, with the ordinals that the frames name them by.

        Raises:
            RecordError: One of them is no longer there.
        """
        ordinal = 0
        for record in self._trajectories.finished():
            # What was added since is passed over.
            if ordinal < len(self._table) and record.key == self._table.key(ordinal):
                yield ordinal, record
                ordinal += 1
        if ordinal < len(self._table):
            raise RecordError("the run was changed while it was read; try again")


def read_contents(runs: Sequence[RunFiles], *, observe: Callable[[EndedRecord], None] | None = None) -> Contents:
    """Read all locations; streamed, memory is some 100 bytes a trajectory.

    Args:
        observe: Called with each trajectory: the finished ones first, then those that failed, then those dropped.

    Raises:
        RunRefused: The locations are not of one run, or a manifest cannot be read.
        RecordError: A shard's Parquet file is none, or two environments have trajectories of one task.
    """
    manifest = common_manifest(runs)
    trajectories = Trajectories([run.storage for run in runs])
    table = Table()
    failures: dict[TrajectoryKey, Failure] = {}
    dropped: dict[TrajectoryKey, Dropped] = {}
    texts: dict[str, str] = {}
    for record in trajectories:
        if isinstance(record, TrajectoryRecord):
            table.add(record)
        elif isinstance(record, FailureRecord):
            names = (record.task_name, record.kind, record.stage, record.cause)
            failures[record.key] = Failure(*(texts.setdefault(name, name) for name in names))
        else:
            dropped[record.key] = Dropped(
                turns=record.turn_count,
                generated_tokens=record.tokens.generated,
                reward=record.total_reward,
                environment=texts.setdefault(record.task_name, record.task_name),
                reason=texts.setdefault(record.reason, record.reason),
                finished=record.stop_reason is not None,
            )
        if observe is not None:
            observe(record)
    if environments := trajectories.precedence.environments:
        raise several_environments(*next(iter(environments.items())))
    return Contents(
        manifest=manifest,
        frames=table.frames(),
        stop_reasons=table.stop_reasons,
        failures=failures,
        dropped=dropped,
        duplicates=trajectories.precedence.duplicates,
        _table=table,
        _trajectories=trajectories,
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
