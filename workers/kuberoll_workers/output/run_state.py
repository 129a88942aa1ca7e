"""State of a run, from its files: where a resumed run continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kuberoll_workers.data.causes import REASONS
from kuberoll_workers.data.record import (
    DroppedRecord,
    FailureRecord,
    Partial,
    RecordError,
    TrajectoryKey,
    TrajectoryRecord,
)
from kuberoll_workers.data.stop_reasons import WHOLE_GROUP
from kuberoll_workers.output import records
from kuberoll_workers.output.group_records import GroupRecords
from kuberoll_workers.output.key_set import KeySet
from kuberoll_workers.output.storage import Storage
from kuberoll_workers.output.trajectories import Trajectories
from kuberoll_workers.output.turn_log import TurnLog
from kuberoll_workers.output.unscored import UnscoredTrajectories

_ELSEWHERE = "the line belongs to another run; move the file away and resume, or choose another --output"


def resumes_from_turns(failure: FailureRecord) -> bool:
    """True if a retry of a failed trajectory continues after its last complete turn (`Reason.keeps_turns`).

    If another sample of its group failed, its turns are valid, as are those of an unscored one.
    """
    if failure.stage == "group" or failure.unscored:
        return True
    known = None if failure.reason is None else REASONS.get(failure.reason)
    return failure.kind == "infrastructure" if known is None else known.keeps_turns


@dataclass(slots=True, kw_only=True)
class RunState:
    """State of some shards.

    Attributes:
        stored: Keys of finished trajectories.
        filtered: Keys of trajectories whose groups were filtered out, or given up as too old.
        attempts: Number of the next attempt, for trajectories that failed.
        unscored: Trajectories that only lack a score.
        groups_kept, groups_filtered: Number of whole groups among `stored`, and of those that were filtered out.
    """

    stored: KeySet = field(default_factory=KeySet)
    filtered: KeySet = field(default_factory=KeySet)
    attempts: dict[TrajectoryKey, int] = field(default_factory=dict)
    groups_kept: int = 0
    groups_filtered: int = 0
    _logs: Mapping[int, TurnLog] = field(default_factory=dict)
    _shard_count: int = 1
    unscored: UnscoredTrajectories = field(default_factory=UnscoredTrajectories)
    _records: GroupRecords | None = None

    def stored_records(self, keys: Sequence[TrajectoryKey]) -> list[TrajectoryRecord]:
        """The stored trajectories among some of one task, without token ids; see `GroupRecords.of`."""
        return [] if self._records is None else self._records.of(keys)

    def take_partial(self, key: TrajectoryKey) -> Partial | None:
        """The recorded turns of an unfinished trajectory, removed from the state; None if there are none."""
        log = self._logs.get(key.task_index % self._shard_count)
        logged = log.partials.pop(key, None) if log is not None else None
        unscored = self.unscored.take(key)
        if logged is None or unscored is None:
            return logged or unscored
        # An attempt after the one that left it unscored may have been interrupted.
        return max(unscored, logged, key=lambda partial: partial.turns[-1].attempt)


def read_state(
    storage: Storage,
    *,
    shards: Collection[int],
    shard_count: int,
    repeats: Mapping[str, int],
    logs: Mapping[int, TurnLog],
    tasks: int | None = None,
    rollouts: int | None = None,
    oversample: int = 0,
) -> RunState:
    """Read the state of some shards from a run's storage.

    Args:
        repeats: Samples of a whole group, by environment.
        logs: Turn logs of the shards, if turns are journaled.
        tasks, rollouts: Number of tasks in the dataset, and maximum number of samples of a task; None if unknown.
        oversample: Samples of a group beyond `repeats`.

    Raises:
        RecordError: A line does not belong to this run; the message names file and line.
    """
    state = RunState(_logs=logs, _shard_count=shard_count)

    def check(record: TrajectoryRecord, shard: str, where: str) -> None:
        _refuse_foreign(
            record, where, shard=shard, shard_count=shard_count, task_names=repeats, tasks=tasks, rollouts=rollouts
        )

    def of_mine(record: DroppedRecord) -> bool:
        return record.task_index % shard_count in mine

    mine = frozenset(shards)

    def group_of(record: TrajectoryRecord | DroppedRecord) -> tuple[int, int, str]:
        # Rows with equal content are one task, and a group each.
        number = record.rollout_index // (repeats.get(record.task_name, 1) + oversample)
        return record.task_index, number, record.task_name

    kept: Counter[tuple[int, int, str]] = Counter()
    filtered: set[tuple[int, int, str]] = set()
    for record in Trajectories([storage], shards=[records.shard_name(shard) for shard in shards], check=check):
        if isinstance(record, TrajectoryRecord):
            state.stored.add(record.key)
            kept[group_of(record)] += 1
        elif isinstance(record, DroppedRecord) and record.reason in WHOLE_GROUP and of_mine(record):
            state.filtered.add(record.key)
            if record.reason == "filtered":
                filtered.add(group_of(record))
    state.groups_kept = sum(count >= repeats[name] for (*_, name), count in kept.items())
    state.groups_filtered = len(filtered)
    incomplete = {task for (task, _, name), count in kept.items() if count < repeats[name]}
    # The attempt whose turns, and those before it, nothing goes on after.
    void: dict[TrajectoryKey, int] = {}
    for failure in records.failures(storage):
        state.attempts[failure.key] = max(failure.attempt + 1, state.attempts.get(failure.key, 0))
        if not resumes_from_turns(failure):
            void[failure.key] = max(failure.attempt, void.get(failure.key, 0))
        if failure.key not in state.stored:
            incomplete.add(failure.task_index)
            if failure.task_index % shard_count in mine and failure.key not in state.filtered:
                state.unscored.add(failure)
    for key, attempt in void.items():
        if state.unscored.attempt(key) <= attempt:
            state.unscored.discard(key)
    state._records = GroupRecords(storage, shard_count=shard_count, likely=incomplete)
    for log in logs.values():
        log.ended(key for key in log.trajectories() if key in void or key in state.stored or key in state.filtered)
    return state


def _refuse_foreign(
    record: TrajectoryRecord,
    where: str,
    *,
    shard: str,
    shard_count: int,
    task_names: Collection[str],
    tasks: int | None,
    rollouts: int | None,
) -> None:
    for name, index in record.key._asdict().items():
        if index < 0:
            raise RecordError(f"{where}: {name} {index}: indexes start at 0; {_ELSEWHERE}")
    own = records.shard_name(record.task_index % shard_count)
    if own != shard:
        raise RecordError(
            f"{where}: task_index {record.task_index} belongs to {own} of {shard_count}: "
            "files of runs must not be renamed or merged; use `kuberoll aggregate` to merge runs"
        )
    if tasks is not None and record.task_index >= tasks:
        raise RecordError(
            f"{where}: task_index {record.task_index} is not one of the dataset's {tasks} tasks: {_ELSEWHERE}"
        )
    if rollouts is not None and record.rollout_index >= rollouts:
        raise RecordError(
            f"{where}: rollout_index {record.rollout_index}: no task of this run has more than {rollouts} samples: "
            f"{_ELSEWHERE}"
        )
    if record.task_name not in task_names:
        raise RecordError(
            f"{where}: task_name {record.task_name!r} is not one of the job's environments ({', '.join(task_names)}): "
            f"{_ELSEWHERE}"
        )
