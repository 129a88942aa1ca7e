"""Lines that are none of this run's are named with file and line; those that are there twice count once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.collection.run_state import RunState, read_state
from kuberoll_workers.collection.storage import DirectoryStorage
from kuberoll_workers.data.record import RecordError, encode_line
from tests.collection.support import record


def state(directory: Path, *records: Any, tasks: int | None = 10) -> RunState:
    (directory / "shard-00001.jsonl").write_bytes(b"".join(map(encode_line, records)))
    return read_state(
        DirectoryStorage(directory),
        shards=[1],
        shard_count=2,
        repeats={"env": 1, "other": 1},
        logs={},
        tasks=tasks,
        rollouts=tasks and 2,
    )


def test_what_is_there_counts_once(tmp_path: Path) -> None:
    found = state(tmp_path, record(1), record(3), record(1), record(3, 1))
    assert (len(found.stored), found.duplicates, found.groups_kept) == (3, 1, 3)


@pytest.mark.parametrize(
    ("foreign", "words"),
    [
        (record(2), "task_index 2 belongs into shard-00000 of 2"),
        (record(1, 2), "rollout_index 2: no task of this run has more than 2 samples"),
        (record(-1), "task_index -1: indexes start at 0"),
        (record(1, -1), "rollout_index -1: indexes start at 0"),
        (record(11), "task_index 11 is none of the dataset's 10 tasks"),
        (record(5, task_name="math"), "task_name 'math' is none of the job's environments (env, other)"),
    ],
)
def test_a_line_of_another_run_is_named(foreign: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecordError) as caught:
        state(tmp_path, record(1), foreign)
    assert str(caught.value).startswith(f"{tmp_path}/shard-00001.jsonl:2: {words}")


def test_a_dataset_that_was_forced_may_be_shorter(tmp_path: Path) -> None:
    assert len(state(tmp_path, record(11), tasks=None).stored) == 1
