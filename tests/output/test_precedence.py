"""One line of each trajectory counts, the same one for every reader, wherever the lines are."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll.trainer import Rollouts
from kuberoll.trainer.journals import open_place
from kuberoll_workers.analysis.aggregation.aggregates import aggregate
from kuberoll_workers.analysis.export.exporting import export_run
from kuberoll_workers.analysis.report.trajectory_sample import TrajectorySample
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import (
    DroppedRecord,
    FailureRecord,
    TrajectoryKey,
    TrajectoryRecord,
    decode_line,
    encode_line,
    key_of,
)
from kuberoll_workers.data.stop_reasons import WHOLE_GROUP
from kuberoll_workers.output import records, unreadable
from kuberoll_workers.output.copies import Copies
from kuberoll_workers.output.manifest import RunManifest
from kuberoll_workers.output.precedence import EndedRecord, rank, repeated
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.run_state import read_state
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.output.trajectories import Trajectories
from kuberoll_workers.pods.worker import count_stored
from tests.examples import examples
from tests.output.support import dropped, failure, record
from tests.trainer.support import manifest

SHARDS = 2
MANIFEST_OF_ONES = msgspec.convert(manifest(groups=8, repeats=1, shards=SHARDS), RunManifest)

TASKS, ROLLOUTS, ATTEMPTS, SEEDS = st.integers(0, 3), st.integers(0, 1), st.integers(0, 2), st.integers(0, 2)
CHANGES = {"attempt": ATTEMPTS, "seed": SEEDS}
REWARDS = st.sampled_from([0.0, 0.25, 1.0])
FINISHED = st.builds(record, TASKS, ROLLOUTS, total_reward=REWARDS, **CHANGES)
FAILED = st.builds(failure, TASKS, ROLLOUTS, cause=st.sampled_from(["one", "two"]), **CHANGES)
DROPPED = st.builds(dropped, TASKS, ROLLOUTS, reason=st.sampled_from(["oversampled", "filtered", "stale"]), **CHANGES)
# What a reader cannot use counts nowhere, not even where its key can be read.
BROKEN = st.sampled_from(
    [b"torn\n", b"[]\n", encode_line(record(0, attempt=9)).replace(b'"turn_count"', b'"x"'), b'{"task_index":0}\n']
)
LINES = st.lists(FINISHED | FAILED | DROPPED, max_size=14)
Chosen = dict[TrajectoryKey, EndedRecord]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget which lines were warned of: after a hundred there are no more warnings."""
    yield
    unreadable._warned.clear()


def write(directory: Path, lines: Sequence[EndedRecord], *, table: bool = False, broken: bytes = b"") -> RunFiles:
    """A run of these lines in this order; `table`: the first half of each shard is Parquet, the rest came later."""
    storage = DirectoryStorage(directory)
    for shard in range(SHARDS):
        mine = [line for line in lines if isinstance(line, TrajectoryRecord) and line.task_index % SHARDS == shard]
        path = directory / f"{records.shard_name(shard)}.jsonl"
        path.write_bytes(b"".join(map(encode_line, mine[: len(mine) // 2])) + broken)
        if table:
            records.to_parquet(storage, path.stem)
        with path.open("ab") as file:
            file.writelines(map(encode_line, mine[len(mine) // 2 :]))
    for name, kind in ((records.FAILURES, FailureRecord), (records.DROPPED, DroppedRecord)):
        found = [encode_line(line) for line in lines if isinstance(line, kind)]
        (directory / f"{name}.jsonl").write_bytes(b"".join(found))
    return RunFiles(str(directory))


def by_the_rule(lines: Sequence[EndedRecord]) -> Chosen:
    """The rule of docs/reference/run-files.md once more, but for lines that only their digest tells apart."""
    chosen: Chosen = {}
    for key in {line.key for line in lines}:
        some = [line for line in lines if line.key == key]
        finished: list[EndedRecord] = [line for line in some if isinstance(line, TrajectoryRecord)]
        filtered: list[EndedRecord] = [
            line for line in some if isinstance(line, DroppedRecord) and line.reason == "filtered"
        ]
        stale: list[EndedRecord] = [line for line in some if isinstance(line, DroppedRecord) and line.reason == "stale"]
        some = stale or finished or filtered or some
        some = [line for line in some if line.attempt == max(other.attempt for other in some)]
        some = [line for line in some if isinstance(line, FailureRecord)] or some
        chosen[key] = max(some, key=rank)
    return chosen


def text(item: EndedRecord) -> bytes:
    """Contents to compare by; arrays that were lists are the same."""
    return encode_line(item)


def texts(items: Any) -> dict[TrajectoryKey, bytes]:
    found: dict[TrajectoryKey, bytes] = {}
    for item in items:
        assert item.key not in found
        found[item.key] = text(item)
    return found


@settings(max_examples=examples(60), deadline=None)
@given(lines=LINES, table=st.booleans(), broken=st.lists(BROKEN, max_size=2).map(b"".join))
def test_all_readers_agree(
    lines: list[EndedRecord], table: bool, broken: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("run")
    run = write(directory, lines, table=table, broken=broken)
    chosen = by_the_rule(lines)
    finished = {key: item for key, item in chosen.items() if isinstance(item, TrajectoryRecord)}
    rewards = {key: item.total_reward for key, item in finished.items()}

    # The reader itself: `show`, and the trajectories that `report` lets people read.
    assert texts(run.read()) == texts(chosen.values())
    assert texts(run.trajectories()) == texts(finished.values())

    # `aggregate`, and `report`, whose numbers are its.
    sample = TrajectorySample()
    aggregates = aggregate([run], observe=sample.offer)
    frames = aggregates.contents.frames.values()
    columns = [(frame.tasks, frame.rollouts, frame.columns["total_reward"].values) for frame in frames]
    pairs = [pair for columns_of in columns for pair in zip(*(column.tolist() for column in columns_of), strict=True)]
    assert {TrajectoryKey(task, rollout): reward for task, rollout, reward in pairs} == rewards
    assert len(pairs) == len(rewards)
    assert {item.row.key: item.row.reward for item in sample.items() if item.row.key in rewards} == rewards
    assert sum(summary.failed for summary in aggregates.summaries.values()) == sum(
        isinstance(item, FailureRecord) for item in chosen.values()
    )

    # A copy of a shard, and what `rescore` takes of each.
    for shard, found in Trajectories([run.storage]).by_shard():
        mine = texts(found)
        copied = [decode_line(line, TrajectoryRecord, where="") for line in Copies(str(directory)).trajectories(shard)]
        assert texts(copied) == mine == {key: text(finished[key]) for key in mine}

    # A trainer's reader, which delivers a group, of one trajectory here, as soon as it is whole.
    consumed = Rollouts(
        str(directory),
        manifest=MANIFEST_OF_ONES,
        place=open_place(str(directory)),
        consumer="reader",
        inexact="keep",
        pad_id=0,
        pace=False,
    )
    batches = consumed.batches(1, advantages=None, wait=False)
    taken = [item for batch in batches for group in batch.groups for item in group.trajectories]
    assert set(texts(taken)) == set(finished)

    # `export`.
    if finished:
        path = export_run(run, to="openai-chat", output=directory / "chats.jsonl").path
        assert len(path.read_text().splitlines()) == len(finished)

    # Resume.
    state = read_state(run.storage, shards=range(SHARDS), shard_count=SHARDS, repeats={"env": 1}, logs={})
    of_keys = {key: chosen[key] for key in chosen}
    assert {key for key in of_keys if key in state.stored} == set(finished)
    unwanted = {key for key, item in chosen.items() if isinstance(item, DroppedRecord) and item.reason in WHOLE_GROUP}
    assert {key for key in of_keys if key in state.filtered} == unwanted
    earlier = [count_stored(run.storage, shard, SHARDS) for shard in range(SHARDS)]
    assert sum(item.reward_sum for item in earlier) == sum(rewards.values())
    assert sum(item.trajectories for item in earlier) == len(rewards)


@settings(max_examples=examples(60), deadline=None)
@given(lines=LINES, chance=st.randoms(use_true_random=False))
def test_neither_order_nor_place_nor_format_changes_what_counts(
    lines: list[EndedRecord], chance: random.Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shuffled = list(lines)
    chance.shuffle(shuffled)
    cut = chance.randint(0, len(lines))
    first = write(tmp_path_factory.mktemp("one"), shuffled[:cut], table=chance.random() < 0.5)
    second = write(tmp_path_factory.mktemp("two"), shuffled[cut:])
    expected = texts(by_the_rule(lines).values())
    assert texts(Trajectories([first.storage, second.storage])) == expected
    assert texts(Trajectories([second.storage, first.storage])) == expected


def test_of_one_attempt_the_reward_does_not_decide() -> None:
    """Else what was stored twice would have better rewards than what was stored once."""
    pairs = [[record(task, total_reward=reward) for reward in (0.0, 1.0)] for task in range(400)]
    better = sum(max(pair, key=rank).total_reward for pair in pairs)
    assert 140 < better < 260


def test_a_line_that_kuberoll_would_not_write_has_a_rank() -> None:
    line = encode_line(record(0)).replace(b'"state":null', b'"state":' + str(2**70).encode())
    odd = decode_line(line, TrajectoryRecord, where="x")
    assert rank(odd) == rank(decode_line(line, TrajectoryRecord, where="y")) != rank(record(0))
    other = decode_line(line.replace(str(2**70).encode(), str(2**71).encode()), TrajectoryRecord, where="x")
    assert rank(odd) != rank(other)


def test_keys_that_repeat() -> None:
    keys = [TrajectoryKey(*pair) for pair in [(0, 1), (1, 0), (-1, 2), (0, 1), (2**62, 0), (-1, 2), (-1, 2)]]
    assert repeated(keys) == {(0, 1), (-1, 2)}
    assert repeated([]) == set()


@given(FINISHED | FAILED | DROPPED)
def test_the_key_of_a_line(item: EndedRecord) -> None:
    line = encode_line(item)
    assert key_of(line) == item.key
    # As another program may write it.
    assert key_of(json.dumps(dict(reversed(json.loads(line).items())), indent=1).encode()) == item.key


@pytest.mark.parametrize(
    "line",
    [b"", b"torn", b"[1]", b'{"task_index":0}', b'{"task_index":"0","rollout_index":1}', b'{"task_index":0,"rollout_i'],
)
def test_a_line_without_a_key(line: bytes) -> None:
    assert key_of(line) is None


def test_a_key_that_no_run_has() -> None:
    assert key_of(b'{"task_index":%d,"rollout_index":1}' % 2**70) is None
    assert key_of(b'{"task_index":%d,"rollout_index":1}' % (2**63 - 1)) == (2**63 - 1, 1)


def test_messages_with_other_kinds_of_arrays_are_the_same_line() -> None:
    listed = record(0, messages=[Message("user", "hi", [1, 2])])
    assert rank(listed) == rank(record(0, messages=[Message("user", "hi", token_array([1, 2]))]))
