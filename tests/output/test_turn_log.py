"""The turn log: every turn that was journaled is found again, and files go when nobody needs them."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import TrajectoryKey, TurnRecord, encode_line
from kuberoll_workers.output import turn_log
from kuberoll_workers.output.journal import JournalBroken
from kuberoll_workers.output.turn_log import TurnLog
from tests.rollouts.fakes import until


class Seconds:
    def observe(self, amount: float) -> None:
        assert amount >= 0

    def failed(self) -> None:
        pass


def turn(task_index: int, number: int, *, attempt: int = 0) -> TurnRecord:
    return TurnRecord(
        task_index=task_index,
        rollout_index=0,
        attempt=attempt,
        turn=number,
        messages=[
            Message(
                "assistant",
                "é",
                token_array([3, number]),
                array("f", [-0.5, -1.0]),
                max(1, number),
                (("v", 0, 2),),
                sampled=True,
            ),
            Message("environment", "o", token_array([9]), turn=max(1, number)),
        ],
        reward=0.5,
        reward_parts={"a": 0.5},
        metadata={"turn": number},
        stop_strings=["x"],
        answer=None,
        generation_seconds=0.1,
        environment_seconds=0.2,
    )


NEGATIVE = encode_line(turn(-4, 1)) + encode_line(turn(4, 0))


def log(output: Path, shard: int = 0, *, segment_bytes: int = 1 << 20) -> TurnLog:
    return TurnLog(output, shard, seconds=Seconds(), segment_bytes=segment_bytes)


def numbers(of: TurnLog) -> dict[int, list[tuple[int, int]]]:
    return {key.task_index: [(t.attempt, t.turn) for t in partial.turns] for key, partial in of.partials.items()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def key(task_index: int) -> TrajectoryKey:
    return TrajectoryKey(task_index, 0)


async def test_turns_are_found_again(tmp_path: Path) -> None:
    first = log(tmp_path)
    for number in (1, 2):
        await first.append(turn(4, number))
    await first.append(turn(7, 1))
    await first.close()
    again = log(tmp_path)
    assert numbers(again) == {4: [(0, 1), (0, 2)], 7: [(0, 1)]}
    response, observation = again.partials[key(4)].turns[1].messages
    assert (list(response.token_ids), list(response.logprobs or ())) == ([3, 2], [-0.5, -1.0])
    assert list(observation.token_ids) == [9]
    await again.close()


async def test_what_has_ended_is_forgotten_and_its_files_go(tmp_path: Path) -> None:
    first = log(tmp_path)
    await first.append(turn(4, 1))
    await first.append(turn(7, 1))
    first.ended([key(4)])
    await first.close()
    assert numbers(log(tmp_path)) == {4: [(0, 1)], 7: [(0, 1)]}
    second = log(tmp_path)
    second.ended([key(4), key(7)])
    assert second.partials == {}
    await second.close()
    assert names(tmp_path) == []


async def test_a_long_run_keeps_only_files_that_are_needed(tmp_path: Path) -> None:
    running = log(tmp_path, segment_bytes=1000)
    await running.append(turn(0, 1))
    most = 0
    for index in range(1, 400):
        await running.append(turn(index, 1))
        running.ended([key(index)])
        if index % 20 == 0:
            # Wait for the writer, which otherwise has no reason to be done.
            await running.append(turn(0, 1 + index // 20))
            await asyncio.gather(*running._closing)
            most = max(most, len(names(tmp_path / "turns")))
    await running.close()
    # The files that hold the one trajectory that goes on, and the newest.
    assert most <= 22
    assert numbers(log(tmp_path))[0] == [(0, number) for number in range(1, 21)]


@pytest.mark.parametrize(("more", "files"), [(0, [2, 2, 1]), (1, [3, 2])])
async def test_a_file_is_followed_by_another_when_it_has_its_size(tmp_path: Path, more: int, files: list[int]) -> None:
    size = len(encode_line(turn(1, 1)))
    running = log(tmp_path, segment_bytes=2 * size + more)
    for index in range(1, 6):
        await running.append(turn(index, 1))
    await running.close()
    assert names(tmp_path / "turns") == [f"shard-00000-{number + 1:06d}.jsonl" for number in range(len(files))]
    counts = [(tmp_path / "turns" / name).read_bytes().count(b"\n") for name in names(tmp_path / "turns")]
    assert counts == files
    # A log that is opened again writes into a file of its own, after those that are there.
    again = log(tmp_path, segment_bytes=2 * size + more)
    assert again.trajectories() == {key(index) for index in range(1, 6)}
    await again.append(turn(9, 1))
    await again.close()
    assert names(tmp_path / "turns")[-1] == f"shard-00000-{len(files) + 1:06d}.jsonl"


async def test_a_trajectory_that_was_run_again_from_a_turn_on_has_its_newer_turns(tmp_path: Path) -> None:
    running = log(tmp_path)
    for number in (1, 2, 3):
        await running.append(turn(4, number))
    await running.append(turn(4, 2, attempt=1))
    # Without its first turn there is nothing to go on with.
    await running.append(turn(6, 2))
    # One that does not follow what is there is passed over.
    await running.append(turn(4, 4, attempt=1))
    await running.close()
    again = log(tmp_path)
    assert numbers(again) == {4: [(0, 1), (1, 2)]}
    assert again.trajectories() == {key(4), key(6)}
    await again.close()


async def test_turns_wait_where_too_many_wait_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_log, "_PENDING_BYTES", 0)
    running = log(tmp_path)
    for index in range(1, 4):
        await running.append(turn(index, 1))
        (path,) = (tmp_path / "turns").iterdir()
        assert path.read_bytes().count(b"\n") == index
    await running.close()


async def test_shards_have_logs_of_their_own(tmp_path: Path) -> None:
    logs = [log(tmp_path, shard) for shard in (0, 1)]
    for shard, one in enumerate(logs):
        await one.append(turn(shard, 1))
    logs[0].ended([key(0)])
    for one in logs:
        await one.close()
    assert numbers(log(tmp_path, 0)) == {}
    assert numbers(log(tmp_path, 1)) == {1: [(0, 1)]}


async def test_a_torn_last_line_is_a_turn_less(tmp_path: Path) -> None:
    first = log(tmp_path)
    await first.append(turn(4, 1))
    await first.append(turn(4, 2))
    await first.close()
    (path,) = (tmp_path / "turns").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    again = log(tmp_path)
    assert numbers(again) == {4: [(0, 1)]}
    # And is gone on with in another file.
    await again.append(turn(4, 2, attempt=1))
    await again.close()
    assert numbers(log(tmp_path)) == {4: [(0, 1), (1, 2)]}


@pytest.mark.parametrize(
    "garbage",
    [b"\0" * 4096 + b"\n", b'{"not": "a turn"}\n', b"\xff\xfe\n", b"\n" * 3 + b"text\n", NEGATIVE, b"\0" * 4096],
)
async def test_garbage_is_passed_over_with_a_warning_and_costs_its_turns_alone(
    garbage: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = log(tmp_path)
    await first.append(turn(4, 1))
    await first.append(turn(6, 1))
    await first.close()
    (path,) = (tmp_path / "turns").iterdir()
    one, other = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(one + garbage + (other if garbage.endswith(b"\n") else b""))
    again = log(tmp_path)
    assert set(numbers(again)) == ({4, 6} if garbage.endswith(b"\n") else {4})
    if garbage.endswith(b"\n"):
        assert f"{path}:" in caplog.text
    again.ended([TrajectoryKey(4, 0), TrajectoryKey(6, 0)])
    await again.close()
    assert not (tmp_path / "turns").exists()


async def test_files_that_cannot_be_read_stop_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "turns" / "shard-00000-000001.jsonl").mkdir(parents=True)
    (tmp_path / "turns" / "shard-00000-notes.jsonl").write_text("somebody's\n")
    again = log(tmp_path)
    assert "Is a directory" in caplog.text
    await again.append(turn(4, 1))
    await again.close()
    assert set(numbers(log(tmp_path))) == {4}


def test_a_log_is_opened_while_another_shard_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And removes the directory, once it was seen and before it is listed."""
    directory, list_directory = tmp_path / "turns", os.scandir
    directory.mkdir()

    def end_and_list(path: str) -> Iterator[os.DirEntry[str]]:
        directory.rmdir()
        return list_directory(path)

    monkeypatch.setattr(os, "scandir", end_and_list)
    assert log(tmp_path).partials == {}
    assert not directory.exists()


async def test_a_log_that_cannot_be_written_says_so(tmp_path: Path, full_disk: Path) -> None:
    first = log(tmp_path)
    (tmp_path / "turns").mkdir()
    (tmp_path / "turns" / "shard-00000-000001.jsonl").symlink_to(full_disk)
    await first.append(turn(4, 1))
    journal = first._journal
    assert journal is not None
    await until(lambda: journal.unwritten == 0)
    with pytest.raises(OSError, match=r"shard-00000-000001.*No space left"):
        await first.append(turn(4, 2))
    # It holds the file's lock.
    with pytest.raises(JournalBroken, match="No space left"):
        await journal.close()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=20),
    st.sets(st.integers(0, 3)),
)
def test_the_newest_unbroken_row_of_turns_counts(written: list[tuple[int, int]], ended: set[int]) -> None:
    """Against a model: a turn replaces itself and all later ones; one that follows none is passed over."""
    import tempfile

    expected: dict[int, list[int]] = {}
    for task, number in written:
        row = expected.setdefault(task, [])
        if number <= len(row) + 1:
            row[number - 1 :] = [number]

    async def run(output: Path) -> dict[int, list[tuple[int, int]]]:
        first = log(output, segment_bytes=600)
        for task, number in written:
            await first.append(turn(task, number))
        await first.close()
        again = log(output)
        again.ended(map(key, ended))
        return numbers(again)

    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(run(Path(name)))
    assert {task: [number for _, number in row] for task, row in found.items()} == {
        task: row for task, row in expected.items() if row and task not in ended
    }
