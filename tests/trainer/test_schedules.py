"""A trainer and its workers, restarted anywhere: no group is lost, doubled or too old, and nobody waits for ever.

The trainer and the journals are the real ones; workers are scripted: they begin what the real plan allows, and write
the lines that real ones write, in any order, until they are killed.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import uuid
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll.trainer import GroupKey, Rollouts
from kuberoll.trainer.batch import is_exact
from kuberoll.trainer.pace_control import PaceControl
from kuberoll_workers.data.intervals import IntervalSet
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import (
    AnyRecord,
    DroppedRecord,
    FailureRecord,
    TrajectoryKey,
    TrajectoryRecord,
    encode_line,
)
from kuberoll_workers.output import records
from kuberoll_workers.output.consumer_plan import read_plan
from kuberoll_workers.output.manifest import AGGREGATES, MANIFEST
from kuberoll_workers.output.run_state import read_state
from kuberoll_workers.output.storage import open_storage
from kuberoll_workers.output.trajectories import Trajectories
from kuberoll_workers.rollouts.pace import Pace
from tests.examples import examples
from tests.output.support import dropped, failure
from tests.trainer.support import manifest, trajectory

SCHEDULES: Final = int(os.environ.get("KUBEROLL_SCHEDULES", "0"))
"""Schedules to play; 0: as many as of other properties."""
_PATIENCE = 600

FATES = ("plain", "plain", "plain", "plain", "short", "failing", "once", "filtered", "inexact", "half")


@dataclass(frozen=True)
class Setting:
    """What a run's manifest and its trainer say."""

    max_lag: int | None
    max_ahead: int | None
    on_stale: str
    shards: int
    rows: int
    epochs: int
    repeats: int
    oversample: int
    atomic: bool
    batch: int
    batches_per_version: int
    inexact: Any
    remote: bool

    @property
    def groups_per_version(self) -> int:
        return self.batch * self.batches_per_version

    @property
    def size(self) -> int:
        return self.repeats + self.oversample

    def manifest(self) -> dict[str, Any]:
        found = manifest(
            groups=self.rows,
            repeats=self.repeats,
            shards=self.shards,
            **{
                "dataset.epochs": self.epochs,
                "rollout.groups.oversample": self.oversample,
                "rollout.groups.atomic": self.atomic,
                "rollout.onPolicy.maxLag": self.max_lag,
                "rollout.onPolicy.maxAhead": self.max_ahead,
                "rollout.onPolicy.onStale": self.on_stale,
            },
        )
        found["inputs"]["rows_of_shards"] = [len(range(shard, self.rows, self.shards)) for shard in range(self.shards)]
        return found


@st.composite
def setting_of(draw: st.DrawFn) -> Setting:
    max_lag, max_ahead = draw(st.sampled_from([(0, None), (1, None), (2, None), (None, 4), (0, 4), (1, 5), (2, 3)]))
    batch = draw(st.integers(1, 3))
    per_version = draw(st.integers(1, 3))
    return Setting(
        max_lag=max_lag,
        max_ahead=max_ahead,
        on_stale=draw(st.sampled_from(["Drop", "Finish"])),
        shards=draw(st.integers(1, 3)),
        rows=draw(st.integers(3, 9)),
        epochs=draw(st.integers(1, 2)),
        repeats=draw(st.integers(1, 3)),
        oversample=draw(st.sampled_from([0, 0, 1])),
        atomic=draw(st.booleans()),
        batch=batch,
        batches_per_version=per_version,
        inexact=draw(st.sampled_from(["skip", "keep"])),
        remote=draw(st.booleans()),
    )


class World:
    """The run: its storage, the engine's version, and what becomes of each group."""

    def __init__(self, location: str, setting: Setting, chance: random.Random) -> None:
        self.location = location
        self.setting = setting
        self.chance = chance
        self.storage = open_storage(location)
        if not setting.remote:
            Path(location).mkdir()
        self.storage.write(MANIFEST, json.dumps(setting.manifest()).encode())
        self.version = 0
        self.lives = 0
        self.groups = [
            [
                GroupKey(task, epoch)
                for epoch in range(setting.epochs)
                for task in range(shard, setting.rows, setting.shards)
            ]
            for shard in range(setting.shards)
        ]
        self.fates = {key: chance.choice(FATES) for keys in self.groups for key in keys}
        self.parts = 0

    def write(self, lines: Sequence[AnyRecord], owner: str) -> None:
        """Append lines, those of a journal together, as one worker."""
        by_journal: dict[str, bytes] = {}
        for line in lines:
            by_journal[self.journal_of(line)] = by_journal.get(self.journal_of(line), b"") + encode_line(line)
        for name, data in by_journal.items():
            if self.setting.remote:
                self.parts += 1
                self.storage.write(f"{name}/{owner}-{self.parts:08d}.jsonl", data)
                continue
            path = Path(self.location) / (f"{name}.jsonl" if name.startswith("shard") else f"{name}/{owner}.jsonl")
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(data)

    def journal_of(self, line: AnyRecord) -> str:
        if isinstance(line, TrajectoryRecord):
            return records.shard_name(line.task_index % self.setting.shards)
        return records.DROPPED if isinstance(line, DroppedRecord) else records.FAILURES


@dataclass
class Flight:
    """A group that has begun."""

    key: GroupKey
    order: int
    version: int
    keep: int
    members: dict[int, int]
    """Attempt by rollout index, of those that are in flight."""
    held: list[AnyRecord] = field(default_factory=list)


class Worker:
    """A worker of one shard, from its start to its death."""

    def __init__(self, world: World, shard: int) -> None:
        self.world, self.shard = world, shard
        setting = world.setting
        world.lives += 1
        self.owner = f"worker-{shard:05d}-{world.lives:08x}"
        held = setting.max_lag if setting.on_stale == "Drop" else None
        self.pace = Pace(max_lag=held, held=True)
        state = read_state(
            world.storage,
            shards=[shard],
            shard_count=setting.shards,
            repeats={"env": setting.repeats},
            logs={},
        )
        self.todo: list[Flight] = []
        for order, key in enumerate(world.groups[shard]):
            indexes = range(key.number * setting.size, (key.number + 1) * setting.size)
            keys = [TrajectoryKey(key.task_index, index) for index in indexes]
            stored = sum(one in state.stored for one in keys)
            if stored >= setting.repeats or any(one in state.filtered for one in keys):
                continue
            left = [one for one in keys if one not in state.stored]
            attempt = max(state.attempts.get(one, 0) for one in keys)
            attempts = {one.rollout_index: attempt for one in left}
            self.todo.append(Flight(key, order, 0, setting.repeats - stored, attempts))
        self.todo.reverse()
        self.flying: list[Flight] = []
        self.look()

    @property
    def done(self) -> bool:
        return not self.todo and not self.flying

    def look(self) -> None:
        """Read the plan."""
        plan = read_plan(self.world.storage, shards=self.world.setting.shards)
        if plan is None:
            return
        assert plan.room is not None
        self.pace.update(
            version=plan.version,
            room=plan.room[self.shard],
            settled=IntervalSet.of(plan.settled[self.shard]),
            stopped=plan.stopped,
        )
        for flight in [flight for flight in self.flying if self.pace.is_stale(flight.version)]:
            self.flying.remove(flight)
            lines = [self.left_out(flight, index, "stale") for index in flight.members]
            lines += [self.left_out(flight, line.rollout_index, "stale") for line in flight.held]
            self.world.write(lines, self.owner)

    def step(self) -> None:
        """Begin a group, or end a trajectory."""
        chance = self.world.chance
        if self.todo and len(self.flying) < 4 and (not self.flying or chance.random() < 0.5):
            if self.pace.may_begin(self.todo[-1].order):
                flight = self.todo.pop()
                # A retried trajectory may go on with turns of before; here all begin anew.
                flight.version = self.world.version
                self.flying.append(flight)
        elif self.flying:
            self.end_one(chance.choice(self.flying))

    def end_one(self, flight: Flight) -> None:
        setting, fate = self.world.setting, self.world.fates[flight.key]
        index = self.world.chance.choice(list(flight.members))
        attempt = flight.members.pop(index)
        first = index % setting.size == 0
        line: AnyRecord
        if fate == "failing" or (fate == "short" and first) or (fate == "once" and not attempt and first):
            line = failure(flight.key.task_index, index, attempt=attempt, group_order=flight.order)
        else:
            line = self.finished(flight, index, attempt, exact=fate != "inexact" and not (fate == "half" and first))
            flight.keep -= 1
        flight.held.append(line)
        if not setting.atomic and fate != "filtered":
            self.world.write([flight.held.pop()], self.owner)
        if flight.keep == 0:
            flight.held += [self.left_out(flight, index, "oversampled") for index in flight.members]
            flight.members.clear()
        elif setting.atomic and flight.keep > len(flight.members):
            for index, attempt in flight.members.items():
                flight.held.append(failure(flight.key.task_index, index, attempt=attempt, group_order=flight.order))
            flight.members.clear()
        if flight.members:
            return
        self.flying.remove(flight)
        if flight.keep and setting.atomic:
            flight.held = [
                failure(
                    flight.key.task_index,
                    line.rollout_index,
                    attempt=line.attempt,
                    group_order=flight.order,
                    stage="group",
                )
                for line in flight.held
            ]
        elif not flight.keep and fate == "filtered":
            flight.held = [self.left_out(flight, line.rollout_index, "filtered") for line in flight.held]
        self.world.write(flight.held, self.owner)

    def finished(self, flight: Flight, index: int, attempt: int, *, exact: bool) -> TrajectoryRecord:
        ids, scores = token_array([2, index]), array("f", [-0.5, -0.25]) if exact else None
        newest = self.world.version
        return trajectory(
            flight.key.task_index,
            index,
            attempt=attempt,
            group_order=flight.order,
            messages=[
                Message("user", "p", token_array([1])),
                Message(
                    "assistant", "a", ids, scores, 1, [(str(flight.version), 0, 1), (str(newest), 1, 2)], sampled=True
                ),
            ],
            turn_count=1,
        )

    def left_out(self, flight: Flight, index: int, reason: str) -> DroppedRecord:
        return dropped(flight.key.task_index, index, reason=reason, group_order=flight.order)


class Trainer:
    """A trainer that takes batches, publishes, saves checkpoints, and is restarted from the last one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.taken: list[tuple[GroupKey, int]] = []
        self.since = 0
        self.restored_older = False
        self.saved: str = ""
        self.over = False
        self.open()
        self.save()

    def open(self) -> None:
        setting = self.world.setting
        self.rollouts = Rollouts.open(
            self.world.location, inexact=setting.inexact, groups_per_version=setting.groups_per_version
        )

    def save(self) -> None:
        self.saved = json.dumps([self.rollouts.state_dict(), self.taken, self.since, self.rollouts.version])

    def restart(self) -> None:
        self.over = False
        state, taken, self.since, version = json.loads(self.saved)
        self.taken = [(GroupKey(*key), lag) for key, lag in taken]
        self.open()
        # What was begun with weights of a life that is lost may be too old for this one.
        self.restored_older |= self.rollouts.version != version
        self.rollouts.load_state_dict(state)

    def step(self) -> bool:
        """Publish if it is time, else take a batch if there is one; True if something happened."""
        setting = self.world.setting
        if self.since >= setting.groups_per_version:
            self.since = 0
            # All replicas serve it before the plan says so.
            self.world.version = self.rollouts.version + 1
            self.rollouts.published()
            return True
        try:
            batch = next(self.rollouts.batches(setting.batch, advantages=None, timeout=0), None)
        except TimeoutError:
            return False
        if batch is None:
            self.over = True
            return False
        for group in batch.groups:
            oldest = min(
                int(version)
                for record in group.trajectories
                for message in record.messages
                for version, *_ in message.policy_versions or ()
            )
            self.taken.append((group.key, self.rollouts.version - oldest))
        self.since += len(batch.groups)
        return True


@contextmanager
def place(remote: bool) -> Iterator[str]:
    if remote:
        name = uuid.uuid4().hex
        yield f"memory://{name}/run"
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield f"{directory}/run"


def play(world: World) -> Trainer:
    """Restarts and conversions anywhere for a while, and then none until the run has ended."""
    chance, setting = world.chance, world.setting
    workers = [Worker(world, shard) for shard in range(setting.shards)]
    trainer = Trainer(world)
    quiet = 0
    for round_ in range(100 * _PATIENCE):
        before = len(trainer.taken), sum(len(worker.todo) + len(worker.flying) for worker in workers)
        shard = chance.randrange(setting.shards)
        match chance.randrange(16):
            case 0 if round_ < 300:
                workers[shard] = Worker(world, shard)
            case 1 if round_ < 300:
                trainer.restart()
            case 2 | 3:
                trainer.save()
            case 4 | 5 | 6:
                trainer.step()
            case 7 | 8:
                workers[shard].look()
            case 9 if setting.remote:
                world.storage.compact(chance.choice([records.DROPPED, records.FAILURES]))
            case _:
                workers[shard].step()
        if all(worker.done for worker in workers):
            break
        after = len(trainer.taken), sum(len(worker.todo) + len(worker.flying) for worker in workers)
        quiet = 0 if before != after else quiet + 1
        assert quiet < _PATIENCE, "they wait for each other for ever"
    parquet = chance.random() < 0.3
    for shard in range(setting.shards):
        if parquet:
            records.to_parquet(world.storage, records.shard_name(shard))
        else:
            world.storage.compact(records.shard_name(shard))
        if chance.random() < 0.3:
            trainer.restart()
        trainer.step()
    for name in (records.FAILURES, records.DROPPED):
        world.storage.compact(name)
        trainer.step()
    world.storage.write(AGGREGATES, b"{}")
    for _ in range(_PATIENCE):
        trainer.step()
        if trainer.over:
            return trainer
        if chance.random() < 0.1:
            trainer.save()
    raise AssertionError("the trainer waits for groups of a run that has ended")


@pytest.mark.slow
@settings(max_examples=SCHEDULES or examples(40), deadline=None)
@given(setting=setting_of(), seed=st.integers(0, 1 << 32))
def test_schedules_of_a_trainer_and_a_run_with_restarts(setting: Setting, seed: int) -> None:
    check(setting, seed)


def check(setting: Setting, seed: int) -> None:
    with place(setting.remote) as location:
        world = World(location, setting, random.Random(seed))
        trainer = play(world)
        keys = [key for key, _ in trainer.taken]
        assert len(keys) == len(set(keys))
        if setting.max_lag is not None:
            assert max((lag for _, lag in trainer.taken), default=0) <= setting.max_lag
        # Each group was delivered, or there is a reason why not.
        lines = list(Trajectories([world.storage]))
        assert len(lines) == len({line.key for line in lines})

        def group_of(line: Any) -> GroupKey:
            return GroupKey(line.task_index, line.rollout_index // setting.size)

        stale = {group_of(line) for line in lines if isinstance(line, DroppedRecord) and line.reason == "stale"}
        filtered = {group_of(line) for line in lines if isinstance(line, DroppedRecord) and line.reason == "filtered"}
        finished: dict[GroupKey, list[TrajectoryRecord]] = {}
        for line in lines:
            if isinstance(line, TrajectoryRecord):
                finished.setdefault(group_of(line), []).append(line)
        skipped = {key for key, members in finished.items() if not any(map(is_exact, members))}
        skipped = skipped if setting.inexact == "skip" else set()
        failed = {group_of(line) for line in lines if isinstance(line, FailureRecord)} - finished.keys()
        # Of a group that was delivered short, a trajectory that was tried again may be too old.
        half_stale = stale & set(keys) & finished.keys()
        stale -= half_stale
        assert set(keys) | stale | filtered | skipped | failed == set(world.fates)
        assert not set(keys) & (stale | filtered | skipped | failed)
        # What is too old is not finished, for anybody.
        assert not stale & finished.keys()
        # A group that has failed and is tried again comes between those that were to be taken with a version.
        shards = world.storage.shards()
        tried_again = any(record.attempt for shard in shards for record in records.trajectories(world.storage, shard))
        if setting.on_stale == "Finish" and not trainer.restored_older and not tried_again:
            assert not stale
        counts = trainer.rollouts.counts
        assert (counts.groups, counts.stale_groups, counts.filtered_groups) == (len(keys), len(stale), len(filtered))
        # Who comes later, and reads what is there, has the same groups but those that are left out of its own will.
        reader = Rollouts.open(location, consumer="late", pace=False, inexact=setting.inexact)
        late = {group.key for batch in reader.batches(3, advantages=None, wait=False) for group in batch.groups}
        assert late <= set(keys)
        assert set(keys) - late <= half_stale


def setting_with(**changes: Any) -> Setting:
    given: dict[str, Any] = {
        "max_lag": None,
        "max_ahead": None,
        "on_stale": "Drop",
        "shards": 1,
        "rows": 8,
        "epochs": 1,
    }
    given |= {"repeats": 2, "oversample": 0, "atomic": False, "batch": 2, "batches_per_version": 1}
    return Setting(**{**given, "inexact": "skip", "remote": False, **changes})


def run_out(worker: Worker) -> None:
    """Begin and end all that the plan allows."""
    worker.look()
    before = -1
    while before != (before := len(worker.todo) + sum(len(flight.members) for flight in worker.flying)):
        for _ in range(20):
            worker.step()


def test_groups_that_a_trainer_skips_make_room_for_others(tmp_path: Path) -> None:
    world = World(str(tmp_path / "run"), setting_with(max_ahead=2), random.Random(0))
    world.fates = dict.fromkeys(world.fates, "inexact")
    worker, trainer = Worker(world, 0), Trainer(world)
    for _ in range(2 * len(world.fates)):
        trainer.step()
        run_out(worker)
    assert worker.done
    assert trainer.rollouts.counts.inexact_trajectories == 16


def test_finish_keeps_its_word_when_the_trainer_is_restarted_within_a_version(tmp_path: Path) -> None:
    setting = setting_with(max_lag=0, on_stale="Finish", rows=24, batches_per_version=2)
    world = World(str(tmp_path / "run"), setting, random.Random(0))
    world.fates = dict.fromkeys(world.fates, "plain")
    worker, trainer = Worker(world, 0), Trainer(world)
    for _ in range(60):
        trainer.step()
        if trainer.since == setting.batch:
            trainer.save()
            trainer.restart()
        run_out(worker)
    assert worker.done
    assert len(trainer.taken) == 24
    assert trainer.rollouts.counts.stale_groups == 0


def test_a_trainer_whose_checkpoint_waits_for_a_publication_goes_on_without_it(tmp_path: Path) -> None:
    """Its next life may take a batch first: strictly on-policy, nothing else would let one begin."""
    world = World(str(tmp_path / "run"), setting_with(max_lag=0), random.Random(0))
    world.fates = dict.fromkeys(world.fates, "plain")
    worker, trainer = Worker(world, 0), Trainer(world)
    while trainer.since < 2:
        trainer.step()
        run_out(worker)
    trainer.save()
    trainer.restart()
    trainer.since = 0
    for _ in range(3):
        trainer.step()
        run_out(worker)
    assert len(trainer.taken) == 4


def test_a_change_of_the_pace_that_would_not_be_written_is_refused(tmp_path: Path) -> None:
    world = World(str(tmp_path / "run"), setting_with(max_ahead=2), random.Random(0))
    pace = Trainer(world).rollouts._pace
    assert pace is not None
    with pytest.raises(RuntimeError, match="in a block of `changing` only"):
        pace.settle(GroupKey(0, 0), 0)
    with pytest.raises(ValueError, match="found 0, but 0 was published"), pace.changing():
        pace.published(0)
    # Nothing was changed.
    assert read_plan(world.storage, shards=1) is None


def fail_after_a_change(pace: PaceControl) -> None:
    with pace.changing():
        pace.settle(GroupKey(0, 0), 0)
        raise KeyError


def test_what_was_changed_before_an_error_is_written(tmp_path: Path) -> None:
    world = World(str(tmp_path / "run"), setting_with(max_ahead=2), random.Random(0))
    pace = Trainer(world).rollouts._pace
    assert pace is not None
    with pytest.raises(KeyError):
        fail_after_a_change(pace)
    plan = read_plan(world.storage, shards=1)
    assert plan is not None
    assert plan.settled == [[0, 1]]
