"""Which prompt groups have ended, decided from the lines of a run as they are read; nothing here reads files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kuberoll_workers.data.intervals import IntervalSet
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, RecordError, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import OVERRULING, WHOLE_GROUP
from kuberoll_workers.output.key_set import KeySet
from kuberoll_workers.output.manifest import RunManifest
from kuberoll_workers.output.precedence import rank

GROUP_STAGE = "group"
"""Stage of a failure that ended all trajectories of its group together."""


class GroupKey(NamedTuple):
    """Identity of a prompt group within its run.

    Attributes:
        number: Of the group among those of its task: rows with equal content are one task, and a group each.
    """

    task_index: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt group that has ended.

    Attributes:
        task_name: Its environment.
        wanted: Number of finished trajectories that it should have; it has fewer if some failed permanently.
        trajectories: The finished ones, by rollout index.
        order: Their `group_order`.
    """

    key: GroupKey
    task_name: str
    wanted: int
    trajectories: tuple[TrajectoryRecord, ...]
    order: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """A group that is not delivered: it was filtered out, was too old, or has failed.

    Attributes:
        order: Its `group_order`.
        stale: Its finished trajectories that no line says to be too old, if the group is.
    """

    key: GroupKey
    order: int | None
    stale: tuple[TrajectoryRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """What a run's manifest says about its groups.

    Attributes:
        repeats: Finished trajectories that a group should have, by environment.
        oversample: Further trajectories that are started for each.
        atomic: A group has all of its trajectories or none.
        shards: Number of shards.
        groups: Number of groups: one for each row in each pass; None: passes have no end.
        wanted: Number of groups to keep; None: all.
        scores_again: The run tries again, before it ends, to score what an outage left without a score.
    """

    repeats: Mapping[str, int]
    oversample: int
    atomic: bool
    shards: int
    groups: int | None
    wanted: int | None
    scores_again: bool = False

    def group_of(self, task_name: str, task_index: int, rollout_index: int, *, where: str) -> GroupKey:
        """The group of a trajectory.

        Raises:
            RecordError: The run has no such environment.
        """
        if (repeats := self.repeats.get(task_name)) is None:
            raise RecordError(
                f"{where}: task_name {task_name!r} is not one of the run's environments ({', '.join(self.repeats)}): "
                "the line belongs to another run; move the file away"
            )
        return GroupKey(task_index, rollout_index // (repeats + self.oversample))

    def only_group_of(self, task_index: int, rollout_index: int) -> GroupKey | None:
        """The group of a trajectory of an unknown environment; None if it depends on the environment."""
        numbers = {rollout_index // (repeats + self.oversample) for repeats in self.repeats.values()}
        return GroupKey(task_index, numbers.pop()) if len(numbers) == 1 else None


_ENVIRONMENT = re.compile(r"environments\[(\d+)\]\.(name|repeats)")


def group_rules(manifest: RunManifest, *, where: str) -> GroupRules:
    """The rules of a run.

    Raises:
        ValueError: The manifest does not have them; the message names the field.
    """
    identity = manifest.identity
    default = _whole(identity, "dataset.repeats", where)
    names: dict[str, str] = {}
    counts: dict[str, Any] = {}
    for path, value in identity.items():
        if (found := _ENVIRONMENT.fullmatch(path)) is not None:
            (names if found[2] == "name" else counts)[found[1]] = value
    wanted = identity.get("rollout.groups.wanted")
    epochs = identity.get("dataset.epochs", 1)
    return GroupRules(
        repeats={name: default if counts.get(number) is None else counts[number] for number, name in names.items()},
        oversample=int(identity.get("rollout.groups.oversample") or 0),
        atomic=bool(identity.get("rollout.groups.atomic")),
        shards=manifest.shards,
        # Manifests from before there were passes have no number of them.
        groups=None if epochs is None else _whole(manifest.inputs, "rows", where) * int(epochs),
        wanted=None if wanted is None else int(wanted),
        scores_again=epochs is not None
        and all(identity.get(f"rollout.onPolicy.{name}") is None for name in ("maxLag", "maxAhead")),
    )


def _whole(values: Mapping[str, Any], name: str, where: str) -> int:
    value = values.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{where}: {name}: found {value!r}, expected a whole number from 1: without it nobody knows when a prompt "
            "group has ended; give the output of `kuberoll run` or of a RolloutJob"
        )
    return value


class ClosedGroups:
    """Groups that were delivered, or that never will be; memory and JSON grow with the gaps between them."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        # By shard, because shards advance at different speeds, and by the group's number within its task.
        self._sets: dict[tuple[int, int], IntervalSet] = {}

    def add(self, key: GroupKey) -> None:
        """Close a group."""
        name, place = self._place(key)
        self._sets.setdefault(name, IntervalSet()).add(place)

    def __contains__(self, key: GroupKey) -> bool:
        name, place = self._place(key)
        return (found := self._sets.get(name)) is not None and place in found

    def __len__(self) -> int:
        return sum(map(len, self._sets.values()))

    def _place(self, key: GroupKey) -> tuple[tuple[int, int], int]:
        place, shard = divmod(key.task_index, self._shards)
        return (shard, key.number), place

    def as_json(self) -> list[list[Any]]:
        """`[shard, number, count, bounds]` of each set, and of as many further ones of the shard that are equal."""
        rows: list[list[Any]] = []
        for (shard, number), found in sorted(self._sets.items()):
            bounds = found.bounds()
            if rows and rows[-1][0] == shard and rows[-1][1] + rows[-1][2] == number and rows[-1][3] == bounds:
                rows[-1][2] += 1
            else:
                rows.append([shard, number, 1, bounds])
        return rows

    @classmethod
    def from_json(cls, shards: int, rows: list[list[Any]]) -> ClosedGroups:
        """The groups of `as_json`.

        Raises:
            ValueError, TypeError: They are not in this form.
        """
        made = cls(shards)
        for shard, first, count, bounds in rows:
            for number in range(first, first + count):
                made._sets[int(shard), number] = IntervalSet.of(bounds)
        return made


class Position(NamedTuple):
    """Place of a line in a file.

    Attributes:
        file: Name within the run; empty for a row of Parquet, which has no place to return to.
        before: Of the line before it, the length and a digest, by which the place is recognized.
    """

    file: str
    offset: int
    before: tuple[int, str]


NO_LINE = 0, ""
NOWHERE = Position("", 0, NO_LINE)


class _Member(NamedTuple):
    record: TrajectoryRecord
    position: Position


@dataclass(slots=True, kw_only=True)
class _OpenGroup:
    task_name: str
    members: dict[int, _Member] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    """Latest failed attempt by rollout index."""
    unscored: set[int] = field(default_factory=set)
    """Those of `failures` that an outage left without a score."""
    ended_together: int = -1
    """Latest attempt of a failure that ended the whole group; -1: none."""
    order: int | None = None


class GroupTracker:
    """The groups of a run that have begun to end.

    Every line is given to `finished`, `failed` or `dropped`. Of several lines of a trajectory one counts by the rule of
    `output.precedence`, of those that were read before its group was closed. A group is ready when as many of its
    trajectories have finished as it should have, or at the end of a pass over the journals, when all have finished or
    failed. A ready group stays in the tracker until it is closed.

    Attributes:
        closed: Groups that were delivered, filtered out, or left out by the caller.
        counted: Groups that were closed when a state was saved: what is read of them again has been counted.
        short: Rollout indexes of the closed groups that had fewer trajectories than they should have.
        filtered_groups, stale_groups: Number of closed groups that were filtered out, and that were too old.
        stale_tokens: Tokens that were generated for trajectories that were too old, as far as they were seen.
        given_up: Groups that were given up, for the caller to take: until then nothing may be saved.
        leaving: Of groups that were too old, and of some of whose trajectories no line was read, the rollout indexes of
            the others.
        late: Number of lines of trajectories that finished after their group was delivered without them.
    """

    def __init__(self, rules: GroupRules) -> None:
        self.rules = rules
        self.closed = ClosedGroups(rules.shards)
        self.counted = ClosedGroups(rules.shards)
        self.short: dict[GroupKey, tuple[int, ...]] = {}
        self.filtered_groups = 0
        self.stale_groups = 0
        self.stale_tokens = 0
        self._stale = KeySet()
        self.given_up: list[GivenUp] = []
        self.leaving: dict[GroupKey, set[int]] = {}
        self.late = 0
        self._open: dict[GroupKey, _OpenGroup] = {}
        # Ready and not closed.
        self._ready: dict[GroupKey, _OpenGroup] = {}
        self._touched: set[GroupKey] = set()
        # Their lines count unless the trajectories have finished, as other lines of the same pass may say.
        self._filtered: dict[GroupKey, tuple[int | None, Position]] = {}
        # Ended without anything to deliver; a resumed run may still finish them.
        self._failed: set[GroupKey] = set()

    @property
    def failed_groups(self) -> int:
        """Number of groups that have ended with nothing to deliver, because their trajectories failed."""
        return len(self._failed)

    @property
    def run_ended(self) -> bool:
        """True if every group that the run is to have has ended: it is ready, closed, or has failed."""
        closed, failed = len(self.closed) + len(self._ready), len(self._failed)
        if self.rules.groups is not None and closed + failed >= self.rules.groups:
            return True
        # Atomic groups that fail are replaced by others of the dataset, like those that were given up.
        kept = closed - self.filtered_groups - self.stale_groups + (0 if self.rules.atomic else failed)
        return self.rules.wanted is not None and kept >= self.rules.wanted

    def is_settled(self, key: GroupKey, rollout_index: int) -> bool:
        """True if a line of this trajectory cannot change anything, so that it need not be decoded."""
        if key not in self.closed:
            return key in self._ready
        return rollout_index in self.leaving.get(key, self.short.get(key, (rollout_index,)))

    def finished(self, record: TrajectoryRecord, position: Position, *, where: str) -> Group | None:
        """Take a finished trajectory; return its group if it is ready now.

        Raises:
            RecordError: It belongs to another run.
        """
        key = self._key(record, where)
        if key in self._ready:
            return None
        if key in self.closed:
            if self._leaves(key, record):
                self.given_up.append(GivenUp(key=key, order=record.group_order, stale=(record,)))
            self.late += key in self.short and record.rollout_index not in self.short[key]
            return None
        group = self._opened(key, record)
        known = group.members.get(record.rollout_index)
        if known is not None and rank(record) <= rank(known.record):
            return None
        group.members[record.rollout_index] = _Member(record, position)
        if len(group.members) >= self.rules.repeats[group.task_name]:
            return self._make_ready(key, group)
        if group.failures:
            self._touched.add(key)
        return None

    def failed(self, record: FailureRecord, *, where: str) -> None:
        """Take a permanent failure.

        Raises:
            RecordError: It belongs to another run.
        """
        key = self._key(record, where)
        if key in self._ready or key in self.closed:
            return
        group = self._opened(key, record)
        rollout, attempt = record.rollout_index, record.attempt
        if attempt >= group.failures.get(rollout, 0):
            group.failures[rollout] = attempt
            (group.unscored.add if record.outage else group.unscored.discard)(rollout)
        if record.stage == GROUP_STAGE:
            group.ended_together = max(record.attempt, group.ended_together)
        self._touched.add(key)

    def dropped(self, record: DroppedRecord, position: Position, *, where: str) -> None:
        """Take a dropped trajectory: one that was filtered out, or was too old, closes its group.

        Others say nothing: they were dropped because their group had enough, which the lines of the others show.

        Raises:
            RecordError: It belongs to another run.
        """
        key = self._key(record, where)
        if record.reason in OVERRULING:
            self._give_up_stale(key, record)
        elif record.reason in WHOLE_GROUP and key not in self._ready and key not in self.closed:
            self._filtered.setdefault(key, (record.group_order, position))
        self._leaves(key, record)

    def _give_up_stale(self, key: GroupKey, record: DroppedRecord) -> None:
        if key not in self.counted:
            self.count_stale(record)
        if key in self.closed:
            return
        group = self._ready.pop(key, None) or self._open.get(key) or _OpenGroup(task_name=record.task_name)
        self._forget(key)
        self.closed.add(key)
        self.stale_groups += 1
        self.leaving[key] = set(group.members)
        finished = (member.record for member in group.members.values())
        stale = tuple(member for member in finished if member.key not in self._stale)
        self.given_up.append(GivenUp(key=key, order=record.group_order, stale=stale))

    def _leaves(self, key: GroupKey, record: TrajectoryRecord | DroppedRecord) -> bool:
        """Note a trajectory of a group that is too old; True if it is the first line of it.

        A failed one may be tried again, and finish.
        """
        if (known := self.leaving.get(key)) is None or record.rollout_index in known:
            return False
        known.add(record.rollout_index)
        if len(known) == self.rules.repeats[record.task_name] + self.rules.oversample:
            del self.leaving[key]
        return True

    def count_stale(self, record: TrajectoryRecord | DroppedRecord) -> None:
        """Count the tokens of a trajectory that was too old, once."""
        if record.key not in self._stale:
            self._stale.add(record.key)
            self.stale_tokens += record.tokens.generated

    def end_pass(self, *, final: bool) -> Iterator[Group]:
        """Groups that are ready now because the rest of their trajectories failed, in the order of the dataset.

        Args:
            final: True if the run is known to have ended. Else a group of which a resumed run has begun to try failed
                trajectories again is waited for.
        """
        filtered, self._filtered = self._filtered, {}
        for key, (order, _) in filtered.items():
            if key not in self._ready and key not in self.closed:
                self._forget(key)
                self.closed.add(key)
                self.filtered_groups += 1
                self.given_up.append(GivenUp(key=key, order=order))
        waiting = set[GroupKey]()
        for key in sorted(self._touched):
            group = self._open[key]
            if not self._has_ended(group, final=final):
                waiting.add(key)
                self._failed.discard(key)
            elif group.members and not self.rules.atomic:
                yield self._make_ready(key, group)
            else:
                if key not in self._failed:
                    self.given_up.append(GivenUp(key=key, order=group.order))
                self._failed.add(key)
        # They may be final later, without a further line.
        self._touched = waiting

    def close(self, key: GroupKey, *, stale: bool = False) -> list[TrajectoryRecord]:
        """Close a ready group: it is delivered, or left out.

        Args:
            stale: It is left out because it is too old.

        Returns:
            All of its finished trajectories, also those that the caller would not have delivered with it.
        """
        group = self._ready.pop(key)
        self.closed.add(key)
        self.stale_groups += stale
        if len(group.members) < self.rules.repeats[group.task_name]:
            if stale:
                self.leaving[key] = set(group.members)
            else:
                self.short[key] = tuple(sorted(group.members))
        return [member.record for member in group.members.values()]

    def needed(self) -> Iterator[Position]:
        """Places of the lines that are still needed: those of groups that are not closed."""
        yield from (position for _, position in self._filtered.values())
        for group in (*self._ready.values(), *self._open.values()):
            yield from (member.position for member in group.members.values())

    def _opened(self, key: GroupKey, record: TrajectoryRecord | FailureRecord) -> _OpenGroup:
        group = self._open.setdefault(key, _OpenGroup(task_name=record.task_name))
        group.order = record.group_order if group.order is None else group.order
        return group

    def _key(self, record: TrajectoryRecord | FailureRecord | DroppedRecord, where: str) -> GroupKey:
        return self.rules.group_of(record.task_name, *record.key, where=where)

    def _has_ended(self, group: _OpenGroup, *, final: bool) -> bool:
        attempts = {rollout: member.record.attempt for rollout, member in group.members.items()}
        if not final and self._waits_for_scores(group):
            return False
        latest = 0 if final else max([*attempts.values(), *group.failures.values()])
        if group.ended_together >= latest:
            return True
        # An older failure is one that a resumed run tries again.
        over = attempts.keys() | {rollout for rollout, attempt in group.failures.items() if attempt >= latest}
        return len(over) >= self.rules.repeats[group.task_name] + self.rules.oversample

    def _waits_for_scores(self, group: _OpenGroup) -> bool:
        if not (self.rules.scores_again and group.unscored - group.members.keys()):
            return False
        # One that has failed for good fails an atomic group.
        return not self.rules.atomic or group.unscored == group.failures.keys()

    def _make_ready(self, key: GroupKey, group: _OpenGroup) -> Group:
        self._forget(key)
        self._ready[key] = group
        return Group(
            key=key,
            task_name=group.task_name,
            wanted=self.rules.repeats[group.task_name],
            trajectories=tuple(group.members[rollout].record for rollout in sorted(group.members)),
            order=group.order,
        )

    def _forget(self, key: GroupKey) -> None:
        self._open.pop(key, None)
        self._touched.discard(key)
        self._failed.discard(key)
