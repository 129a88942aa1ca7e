"""Each group once, whatever writers, crashes, conversions and the consumer's own deaths do."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll.trainer import Batch, GroupKey, Rollouts
from kuberoll_workers.data.record import AnyRecord, DroppedRecord, TrajectoryRecord, encode_line
from kuberoll_workers.output import records
from kuberoll_workers.output.journal import repair
from kuberoll_workers.output.run_directory import AGGREGATES, MANIFEST
from kuberoll_workers.output.storage import open_storage
from tests.output.support import dropped, failure
from tests.trainer.support import manifest, trajectory

GROUPS, REPEATS, SHARDS = 14, 3, 3


def name_of(record: AnyRecord) -> str:
    if isinstance(record, TrajectoryRecord):
        return records.shard_name(record.task_index % SHARDS)
    return records.DROPPED if isinstance(record, DroppedRecord) else records.FAILURES


@dataclass
class Writers:
    """Workers of a run, in a directory or an object store."""

    location: str
    chance: random.Random
    parts: dict[str, int] = field(default_factory=dict)
    owner: str = "worker-00000-aaaa"

    def __post_init__(self) -> None:
        self.storage = open_storage(self.location)
        self.remote = "://" in self.location
        if not self.remote:
            Path(self.location).mkdir(exist_ok=True)
        self.storage.write(MANIFEST, json.dumps(manifest(groups=GROUPS, repeats=REPEATS, shards=SHARDS)).encode())

    def write(self, lines: list[AnyRecord]) -> None:
        """Append lines of one journal; in an object store as a part."""
        name = name_of(lines[0])
        data = b"".join(map(encode_line, lines))
        if self.remote:
            number = self.parts[name] = self.parts.get(name, 0) + 1
            self.storage._fs.pipe_file(f"{self.storage._root}/{name}/{self.owner}-{number:08d}.jsonl", data)  # type: ignore[attr-defined]
            return
        path = Path(self.location) / f"{name}.jsonl"
        with path.open("ab") as file:
            file.write(data)

    def tear(self, record: AnyRecord) -> None:
        """Begin a line, and die."""
        path = Path(self.location) / f"{name_of(record)}.jsonl"
        line = encode_line(record)
        with path.open("ab") as file:
            file.write(line[: self.chance.randrange(1, len(line))])

    def restart(self) -> None:
        """The next part of the run: torn lines are cut off, and parts have other names."""
        self.owner = f"worker-00000-{self.chance.randrange(1 << 16):04x}"
        self.parts = {}
        if not self.remote:
            for path in Path(self.location).glob("*.jsonl"):
                repair(path)

    def convert(self, shard: int, *, parquet: bool) -> None:
        """What a worker does at the end of its shard."""
        if parquet:
            records.to_parquet(self.storage, records.shard_name(shard))
        else:
            self.storage.compact(records.shard_name(shard))


@dataclass
class Consumer:
    """A trainer that is killed and restarted.

    Attributes:
        delivered: What it has had, without what was lost with its last death.
    """

    location: str
    state: str | None = None
    delivered: list[tuple[GroupKey, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    saved: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.rollouts = Rollouts.open(self.location, consumer="test")
        if self.state is not None:
            self.rollouts.load_state_dict(json.loads(self.state))
        del self.delivered[self.saved :]

    def save(self) -> None:
        self.state = json.dumps(self.rollouts.state_dict())
        self.saved = len(self.delivered)

    def take(self, groups: int, most: int | None = None, **options: Any) -> None:
        for number, batch in enumerate(self.rollouts.batches(groups, **options), start=1):
            self.add(batch)
            if number == most:
                return

    def add(self, batch: Batch) -> None:
        for group in batch.groups:
            self.delivered.append((group.key, tuple((r.rollout_index, r.attempt) for r in group.trajectories)))


def planned(chance: random.Random) -> tuple[list[list[AnyRecord]], list[list[AnyRecord]], set[GroupKey], set[GroupKey]]:
    """Lines of both parts of a run, in blocks that are written together, what is delivered, and what is never short."""
    first: list[list[AnyRecord]] = []
    second: list[list[AnyRecord]] = []
    delivered: set[GroupKey] = set()
    whole: set[GroupKey] = set()
    for task in range(GROUPS):
        kind = chance.choice(["whole", "whole", "whole", "filtered", "failed", "short", "retried", "again", "double"])
        key = GroupKey(task, 0)
        members: list[list[AnyRecord]] = [
            [trajectory(task, rollout, reward=float(chance.randrange(3)))] for rollout in range(REPEATS)
        ]
        if kind == "filtered":
            first.append([dropped(task, rollout, reason="filtered") for rollout in range(REPEATS)])
            continue
        if kind == "failed":
            first += [[failure(task, rollout)] for rollout in range(REPEATS)]
            continue
        delivered.add(key)
        if kind == "short":
            first += [[failure(task, 0)]]
            first += members[1:]
        elif kind == "retried":
            # Failed in the first part, and finished in the second.
            first += [[failure(task, 0)]]
            first += members[1:]
            second.append([trajectory(task, 0, attempt=1)])
        elif kind == "again":
            first += [[failure(task, rollout)] for rollout in range(REPEATS)]
            second += [[trajectory(task, rollout, attempt=1)] for rollout in range(REPEATS)]
            whole.add(key)
        else:
            whole.add(key)
            late = chance.randrange(REPEATS + 1)
            first += members[:late]
            second += members[late:]
            if kind == "double":
                # Two workers played the same attempt.
                second.append([trajectory(task, 0, reward=7.0)])
    if chance.random() < 0.7:
        chance.shuffle(first)
        chance.shuffle(second)
    return first, second, delivered, whole


def joined(blocks: list[list[AnyRecord]], chance: random.Random) -> Iterator[list[AnyRecord]]:
    """Blocks of one journal, some of them together: a part has lines of several groups."""
    held: list[AnyRecord] = []
    together = chance.random() < 0.5
    for block in sorted(blocks, key=lambda block: name_of(block[0])) if together else blocks:
        if held and (name_of(held[0]) != name_of(block[0]) or chance.random() < 0.3):
            yield held
            held = []
        held = [*held, *block]
    if held:
        yield held


@contextmanager
def place(remote: bool) -> Iterator[str]:
    if remote:
        location = f"memory://{uuid.uuid4().hex}/run"
        yield location
        fsspec.filesystem("memory").rm(location.removeprefix("memory:/").rpartition("/")[0], recursive=True)
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield f"{directory}/run"


@pytest.mark.slow
@pytest.mark.parametrize("remote", [False, True])
@given(seed=st.integers(0, 1 << 32), parquet=st.booleans())
def test_each_group_is_delivered_once(remote: bool, seed: int, parquet: bool) -> None:
    chance = random.Random(seed)
    first, second, delivered, whole = planned(chance)
    with place(remote) as location:
        writers = Writers(location, chance)
        consumer = Consumer(location)

        def disturb() -> None:
            for _ in range(chance.randrange(3)):
                match chance.randrange(5):
                    case 0:
                        consumer.take(chance.randrange(1, 4), most=1, wait=False)
                    case 1:
                        consumer.take(chance.randrange(1, 4), wait=False)
                    case 2 | 3:
                        consumer.save()
                    case 4:
                        consumer.restart()

        for lines in joined(first, chance):
            writers.write(lines)
            disturb()
        if not remote and second and not hasattr(second[0][0], "reason"):
            writers.tear(second[0][0])
            disturb()
        if chance.random() < 0.3:
            # A shard was done before the run was killed.
            writers.convert(0, parquet=parquet)
            disturb()
        writers.restart()
        for lines in joined(second, chance):
            writers.write(lines)
            disturb()
        for shard in range(SHARDS):
            writers.convert(shard, parquet=parquet)
            disturb()
        for journal in (records.FAILURES, records.DROPPED):
            writers.storage.compact(journal)
            disturb()
        writers.storage.write(AGGREGATES, b"{}")
        disturb()
        # The run has ended: nobody waits any more.
        consumer.take(chance.randrange(1, 4), timeout=60.0)
        keys = [key for key, _ in consumer.delivered]
        assert len(keys) == len(set(keys))
        assert set(keys) == delivered
        for key, members in consumer.delivered:
            assert len(dict(members)) == len(members)
            assert len(members) == REPEATS or key not in whole
        counts = consumer.rollouts.counts
        assert (counts.groups, counts.trajectories) == (
            len(keys),
            sum(len(members) for _, members in consumer.delivered),
        )
        assert counts.short_groups == sum(len(members) < REPEATS for _, members in consumer.delivered)
        assert counts.groups + counts.filtered_groups + counts.failed_groups == GROUPS


@pytest.mark.slow
@pytest.mark.parametrize("remote", [False, True])
@given(seed=st.integers(0, 1 << 32), parquet=st.booleans(), groups=st.integers(1, 4), place_of_death=st.integers(0, 14))
def test_what_follows_a_restart_is_what_would_have_followed_without_it(
    remote: bool, seed: int, parquet: bool, groups: int, place_of_death: int
) -> None:
    chance = random.Random(seed)
    first, second, _, _ = planned(chance)
    with place(remote) as location:
        writers = Writers(location, chance)
        for lines in joined([*first, *second], chance):
            writers.write(lines)
        if parquet:
            for shard in range(SHARDS):
                writers.convert(shard, parquet=True)
        writers.storage.write(AGGREGATES, b"{}")
        without = Consumer(location)
        without.take(groups, timeout=60.0)
        killed = Consumer(location)
        killed.take(groups, most=place_of_death) if place_of_death else None
        killed.save()
        # Its last batch is lost with it.
        killed.take(groups, most=1)
        killed.restart()
        killed.take(groups, wait=False)
        assert killed.delivered == without.delivered


async def test_two_tasks_share_the_groups_of_one_consumer_and_two_consumers_have_all(tmp_path: Path) -> None:
    writers = Writers(str(tmp_path / "run"), random.Random(0))
    for task in range(GROUPS):
        writers.write([trajectory(task, rollout) for rollout in range(REPEATS)])
    one, other = Rollouts.open(writers.location), Rollouts.open(writers.location, consumer="eval")
    had: list[int] = []

    async def read() -> None:
        async for batch in one.batches_async(2):
            had.extend(group.key.task_index for group in batch.groups)

    await asyncio.gather(read(), read())
    assert sorted(had) == list(range(GROUPS))
    everything = [group.key.task_index for batch in other.batches(5) for group in batch.groups]
    assert sorted(everything) == list(range(GROUPS))


async def test_a_task_that_is_cancelled_has_taken_only_what_it_received(tmp_path: Path) -> None:
    writers = Writers(str(tmp_path / "run"), random.Random(0))
    rollouts = Rollouts.open(writers.location)
    had: list[int] = []

    async def read() -> None:
        async for batch in rollouts.batches_async(1):
            had.extend(group.key.task_index for group in batch.groups)
            waiting.set()

    waiting = asyncio.Event()
    task = asyncio.create_task(read())
    for number in range(GROUPS // 2):
        writers.write([trajectory(number, rollout) for rollout in range(REPEATS)])
    await waiting.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for number in range(GROUPS // 2, GROUPS):
        writers.write([trajectory(number, rollout) for rollout in range(REPEATS)])
    async for batch in rollouts.batches_async(1):
        had.extend(group.key.task_index for group in batch.groups)
    assert sorted(had) == list(range(GROUPS))
