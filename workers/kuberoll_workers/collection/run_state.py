"""What a run has already, as its files tell it: the place from which it is continued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kuberoll_workers.collection.journal import (
    DROPPED,
    FAILURES,
    read_dropped,
    read_failures,
    read_trajectories,
    shard_name,
)
from kuberoll_workers.collection.turn_log import TurnLog
from kuberoll_workers.data.record import FailureRecord, Partial, TrajectoryKey


def goes_on(failure: FailureRecord) -> bool:
    """Whether a failed trajectory, when it is tried again, goes on after its last complete turn.

    Where the machines failed it, or a sibling did, its turns are good. What an environment, a row or a response broke
    may have been broken by an earlier turn: it starts over.
    """
    return failure.kind == "infrastructure" or failure.stage == "group"


@dataclass(slots=True, kw_only=True)
class RunState:
    """What there is of some shards.

    Attributes:
        stored: Finished trajectories.
        filtered: Trajectories of groups that were filtered out.
        attempts: The number of the next attempt, of trajectories that failed.
        groups_kept, groups_filtered: Whole groups among `stored` and `filtered`.
    """

    stored: set[TrajectoryKey] = field(default_factory=set)
    filtered: set[TrajectoryKey] = field(default_factory=set)
    attempts: dict[TrajectoryKey, int] = field(default_factory=dict)
    groups_kept: int = 0
    groups_filtered: int = 0
    _logs: Mapping[int, TurnLog] = field(default_factory=dict)
    _shard_count: int = 1

    def take_partial(self, key: TrajectoryKey) -> Partial | None:
        """The turns that a trajectory has already; told once."""
        log = self._logs.get(key.task_index % self._shard_count)
        return log.partials.pop(key, None) if log is not None else None


def read_state(
    output: Path,
    *,
    shards: Collection[int],
    shard_count: int,
    repeats: Mapping[str, int],
    logs: Mapping[int, TurnLog],
) -> RunState:
    """Read what a run's directory holds of some shards.

    Args:
        repeats: Samples of a whole group, by environment.
        logs: The turn logs of the shards, where turns are journaled.

    Raises:
        RecordError: A line is not what it should be, with file and line.
    """
    state = RunState(_logs=logs, _shard_count=shard_count)
    of_task: Counter[tuple[int, str]] = Counter()
    for shard in shards:
        for record in read_trajectories(output / shard_name(shard)):
            if record.key not in state.stored:
                state.stored.add(record.key)
                of_task[record.task_index, record.task_name] += 1
    state.groups_kept = sum(count // repeats[name] for (_, name), count in of_task.items())
    of_task.clear()
    mine = frozenset(shards)
    for dropped in read_dropped(output / DROPPED):
        of_mine = dropped.task_index % shard_count in mine
        if of_mine and dropped.reason == "filtered" and dropped.key not in state.filtered:
            state.filtered.add(dropped.key)
            of_task[dropped.task_index, dropped.task_name] += 1
    state.groups_filtered = sum(-(-count // repeats[name]) for (_, name), count in of_task.items())
    useless = [*state.stored, *state.filtered]
    for failure in read_failures(output / FAILURES):
        state.attempts[failure.key] = failure.attempt + 1
        if not goes_on(failure):
            useless.append(failure.key)
    for log in logs.values():
        log.ended(useless)
    return state
