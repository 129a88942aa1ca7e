"""Lines that are none of this run's are named with file and line; those that are there twice count once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.data.record import RecordError, TrajectoryKey, encode_line
from kuberoll_workers.output.run_state import RunState, read_state
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.output.turn_log import TurnLog
from tests.output.support import Observed, dropped, failure, record, turn


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
    assert (len(found.stored), found.groups_kept) == (3, 3)


@pytest.mark.parametrize(
    ("foreign", "words"),
    [
        (record(2), "task_index 2 belongs to shard-00000 of 2"),
        (record(1, 2), "rollout_index 2: no task of this run has more than 2 samples"),
        (record(-1), "task_index -1: indexes start at 0"),
        (record(1, -1), "rollout_index -1: indexes start at 0"),
        (record(11), "task_index 11 is not one of the dataset's 10 tasks"),
        (record(5, task_name="math"), "task_name 'math' is not one of the job's environments (env, other)"),
    ],
)
def test_a_line_of_another_run_is_named(foreign: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecordError) as caught:
        state(tmp_path, record(1), foreign)
    assert str(caught.value).startswith(f"{tmp_path}/shard-00001.jsonl:2: {words}")


def test_who_finds_a_line_of_another_run_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RecordError) as caught:
        state(tmp_path, record(11))
    assert str(caught.value) == (
        f"{tmp_path}/shard-00001.jsonl:1: task_index 11 is not one of the dataset's 10 tasks: the line belongs to "
        "another run; "
        "move the file away and resume, or choose another --output"
    )


def test_a_dataset_that_was_forced_may_be_shorter(tmp_path: Path) -> None:
    assert len(state(tmp_path, record(11), tasks=None).stored) == 1


def test_groups_that_were_filtered_out_count_whole_ones_of_the_worker_s_shards(tmp_path: Path) -> None:
    """A group whose samples are partly lost counts too: its place was taken by another group."""
    lines = [
        *(dropped(1, number, reason="filtered") for number in range(4)),
        dropped(1, 3, reason="filtered"),
        *(dropped(3, number, reason="filtered") for number in range(5)),
        dropped(5, reason="oversampled"),
        dropped(2, reason="filtered"),
    ]
    (tmp_path / "dropped").mkdir()
    (tmp_path / "dropped" / "a.jsonl").write_bytes(b"".join(map(encode_line, lines)))
    (tmp_path / "shard-00001.jsonl").write_bytes(b"".join(encode_line(record(7, number)) for number in range(9)))
    found = read_state(DirectoryStorage(tmp_path), shards=[1], shard_count=2, repeats={"env": 4}, logs={})
    assert (found.groups_filtered, len(found.filtered)) == (3, 9)
    assert TrajectoryKey(1, 3) in found.filtered
    assert TrajectoryKey(2, 0) not in found.filtered
    assert TrajectoryKey(5, 0) not in found.filtered
    assert (found.groups_kept, len(found.stored)) == (2, 9)


async def test_turns_are_gone_on_with_where_they_are_of_use(tmp_path: Path) -> None:
    """Not those of what is stored or filtered out, nor those that an environment's failure makes doubtful."""
    log = TurnLog(tmp_path, 1, seconds=Observed())
    for task_index in (1, 3, 5, 7, 9, 11):
        await log.append(turn(task_index))
    await log.close()
    storage = DirectoryStorage(tmp_path)
    (tmp_path / "shard-00001.jsonl").write_bytes(encode_line(record(1)))
    (tmp_path / "dropped.jsonl").write_bytes(encode_line(dropped(3, reason="filtered")))
    (tmp_path / "failures.jsonl").write_bytes(
        b"".join(
            map(
                encode_line,
                [
                    failure(5, kind="environment", stage="environment", attempt=2),
                    failure(7, kind="infrastructure"),
                    failure(9, kind="environment", stage="group"),
                ],
            )
        )
    )
    logs = {1: TurnLog(tmp_path, 1, seconds=Observed())}
    found = read_state(storage, shards=[1], shard_count=2, repeats={"env": 1}, logs=logs)
    assert found.attempts == {(5, 0): 3, (7, 0): 1, (9, 0): 1}
    partials = {task_index: found.take_partial(TrajectoryKey(task_index, 0)) for task_index in (1, 3, 5, 7, 9, 11)}
    assert [task_index for task_index, partial in partials.items() if partial is not None] == [7, 9, 11]
    # Handed out once, and of shards that have a log.
    assert found.take_partial(TrajectoryKey(7, 0)) is None
    assert found.take_partial(TrajectoryKey(8, 0)) is None
    await logs[1].close()


def test_groups_of_a_task_are_counted_each(tmp_path: Path) -> None:
    """Rows with equal content are one task: what is left of two groups is not a whole one."""
    lines = [record(1, number) for number in (0, 1, 3, 4, 6, 7)]
    (tmp_path / "shard-00001.jsonl").write_bytes(b"".join(map(encode_line, lines)))
    given = [dropped(3, number, reason="filtered") for number in (0, 3)]
    (tmp_path / "dropped.jsonl").write_bytes(b"".join(map(encode_line, given)))
    for repeats, oversample, kept, filtered in ((3, 0, 0, 2), (2, 1, 3, 2), (4, 0, 0, 1)):
        found = read_state(
            DirectoryStorage(tmp_path),
            shards=[1],
            shard_count=2,
            repeats={"env": repeats},
            logs={},
            oversample=oversample,
        )
        assert (found.groups_kept, found.groups_filtered) == (kept, filtered)
