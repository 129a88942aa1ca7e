"""Content of a run, in one location or several, as columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kuberoll_workers.analysis.aggregation.table import Frame, Table, several_environments
from kuberoll_workers.data.failure_causes import FailureCauses
from kuberoll_workers.data.record import FailureRecord, RecordError, TrajectoryKey, TrajectoryRecord
from kuberoll_workers.data.tracebacks import location
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.run_directory import RunManifest, RunRefused, differences
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.trajectories import Trajectories


class Failure(NamedTuple):
    """A trajectory that failed permanently.

    Attributes:
        location: Where the code of an environment failed, `file:line in function`; empty if unknown.
        reason: A name in `data.causes.REASONS`; empty in runs of older versions.
        turns: The turn in which it failed; 0: before its first.
        generated_tokens: Tokens of its responses.
        unscored: It only lacks a score.
    """

    environment: str
    kind: str
    stage: str
    cause: str
    location: str
    reason: str
    turns: int
    generated_tokens: int
    unscored: bool


class Dropped(NamedTuple):
    """A dropped trajectory."""

    turns: int
    generated_tokens: int
    reward: float
    environment: str
    reason: str
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Content of the locations: each trajectory once, in one of `frames`, `failures` and `dropped`.

    Attributes:
        manifest: Manifest of the run; None if no location has one.
        frames: Finished trajectories, by environment.
        failures: Trajectories that failed permanently.
        causes: Their distinct causes.
        dropped: Dropped trajectories.
        duplicates: Number of lines that do not count because another line of the same trajectory does.
    """

    manifest: RunManifest | None
    frames: Mapping[str, Frame]
    stop_reasons: Sequence[str]
    failures: Mapping[TrajectoryKey, Failure]
    causes: FailureCauses
    dropped: Mapping[TrajectoryKey, Dropped]
    duplicates: int
    _table: Table
    _trajectories: Trajectories

    def reread(self) -> Iterator[tuple[int, TrajectoryRecord]]:
        """Read the finished trajectories again, with their ordinals in the frames.

        Raises:
            RecordError: One of them no longer exists.
        """
        ordinal = 0
        for record in self._trajectories.finished():
            # Trajectories that were added since are skipped.
            if ordinal < len(self._table) and record.key == self._table.key(ordinal):
                yield ordinal, record
                ordinal += 1
        if ordinal < len(self._table):
            raise RecordError("the run was changed while it was read; try again")


def read_contents(runs: Sequence[RunFiles], *, observe: Callable[[EndedRecord], None] | None = None) -> Contents:
    """Read all locations; streamed, memory is about 100 bytes per trajectory.

    Args:
        observe: Called with each trajectory: first the finished, then the failed, then the dropped ones.

    Raises:
        RunRefused: The locations belong to different runs, or a manifest cannot be read.
        RecordError: A shard's Parquet file is invalid, or two environments have trajectories of the same task.
    """
    manifest = common_manifest(runs)
    trajectories = Trajectories([run.storage for run in runs])
    table = Table()
    failures: dict[TrajectoryKey, Failure] = {}
    causes = FailureCauses()
    dropped: dict[TrajectoryKey, Dropped] = {}
    texts: dict[str, str] = {}

    def shared(text: str) -> str:
        return texts.setdefault(text, text)

    for record in trajectories:
        if isinstance(record, TrajectoryRecord):
            table.add(record)
        elif isinstance(record, FailureRecord):
            causes.add(record)
            failures[record.key] = Failure(
                environment=shared(record.task_name),
                kind=shared(record.kind),
                stage=shared(record.stage),
                cause=shared(record.cause),
                location=shared(location(record.frames or ())),
                reason=shared(record.reason or ""),
                turns=record.turn_count + (record.stage == "generation"),
                # Of an unscored one none is thrown away.
                generated_tokens=record.tokens
                or sum(len(message.token_ids) for message in record.messages if message.sampled),
                unscored=record.unscored,
            )
        else:
            dropped[record.key] = Dropped(
                turns=record.turn_count,
                generated_tokens=record.tokens.generated,
                reward=record.total_reward,
                environment=shared(record.task_name),
                reason=shared(record.reason),
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
        causes=causes,
        dropped=dropped,
        duplicates=trajectories.precedence.duplicates,
        _table=table,
        _trajectories=trajectories,
    )


def common_manifest(runs: Sequence[RunFiles]) -> RunManifest | None:
    """The manifest that all locations share; None if none has one.

    Raises:
        RunRefused: The locations belong to different runs, or only some have a manifest.
    """
    first, *others = runs
    manifest = first.manifest()
    for other in others:
        found = other.manifest()
        if (manifest is None) != (found is None):
            with_one, without = (first, other) if found is None else (other, first)
            raise RunRefused(
                f"{without.location} has no manifest.json and {with_one.location} has one, so they cannot "
                "be recognized as one run: copy the run's manifest.json to both, or aggregate them one by one"
            )
        if manifest is None or found is None:
            continue
        # The number of shards does not affect trajectories.
        changed = differences(manifest, dataclasses.replace(found, shards=manifest.shards))
        if changed:
            lines = "\n  ".join(changed)
            raise RunRefused(
                f"{first.location} and {other.location} are different runs, whose trajectories must not be mixed:\n"
                f"  {lines}\nAggregate them one by one"
            )
    return manifest
