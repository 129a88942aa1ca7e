"""A worker's results go to their shards' journals; a shard that is done has its final form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.data.record import RecordError, TrajectoryKey, encode_line
from kuberoll_workers.output import records
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.output.store import Result, ResultStore
from tests.output.support import Observed, dropped, failure, record, turn


def opened(directory: Path, stored: list[Result], **changes: Any) -> ResultStore:
    given: dict[str, Any] = {
        "shards": [0, 1],
        "shard_count": 2,
        "repeats": {"env": 1},
        "turns": None,
        "seconds": Observed(),
        "stored": stored.append,
    }
    return ResultStore(DirectoryStorage(directory), **{**given, **changes})


@pytest.mark.parametrize("parquet", [False, True])
async def test_results_are_in_their_shards_and_shards_in_their_final_form(tmp_path: Path, parquet: bool) -> None:
    stored: list[Result] = []
    store = opened(tmp_path, stored)
    for result in (record(0), record(1), record(2), failure(3), dropped(4)):
        await store.result(result)
    await store.close()
    assert sorted(result.task_index for result in stored) == [0, 1, 2, 3, 4]
    await store.finalize(parquet=parquet)
    suffix = "parquet" if parquet else "jsonl"
    storage = DirectoryStorage(tmp_path)
    shards = [Path(file).name for file in storage.files() if "shard-" in file]
    assert shards == [f"shard-0000{number}.{suffix}" for number in (0, 1)]
    assert [item.task_index for item in records.trajectories(storage, "shard-00000")] == [0, 2]
    assert [item.task_index for item in records.trajectories(storage, "shard-00001")] == [1]
    assert [item.task_index for item in records.failures(storage)] == [3]
    assert [item.task_index for item in records.dropped(storage)] == [4]
    # The next part of the run begins where this one ended.
    again = opened(tmp_path, [])
    assert (len(again.state.stored), again.state.attempts) == (3, {(3, 0): 1})
    await again.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [(record(8), "task_index 8 is not one of the dataset's 8 tasks"), (record(6, 2), "rollout_index 2: no task")],
)
async def test_what_the_dataset_does_not_have_is_refused(tmp_path: Path, line: Any, words: str) -> None:
    (tmp_path / "shard-00000.jsonl").write_bytes(encode_line(line))
    with pytest.raises(RecordError, match=words):
        opened(tmp_path, [], tasks=8, rollouts=2)


async def test_the_turns_of_what_is_stored_are_forgotten(tmp_path: Path) -> None:
    """A failure of the machines keeps them: the next attempt goes on after them."""
    store = opened(tmp_path, [], turns=tmp_path)
    for task_index in range(5):
        await store.turn(turn(task_index))
    await store.result(record(0))
    await store.result(failure(1, kind="environment", stage="environment"))
    await store.result(failure(2, kind="infrastructure"))
    await store.result(dropped(3))
    await store.close()
    again = opened(tmp_path, [], turns=tmp_path)
    partials = {number: again.state.take_partial(TrajectoryKey(number, 0)) for number in range(5)}
    assert [number for number, partial in partials.items() if partial is not None] == [2, 4]
    await again.close()
