"""Reading journals: every line once, and what changes under the reader."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from kuberoll.trainer.groups import NOWHERE
from kuberoll.trainer.journals import Hints, JournalReader, open_place
from kuberoll_workers.data.record import TrajectoryKey, encode_line
from kuberoll_workers.output.storage import ObjectStorage, open_storage
from tests.trainer.support import WrittenRun, trajectory


def reader_of(location: str, hints: Hints | None = None, settled: tuple[TrajectoryKey, ...] = ()) -> JournalReader:
    return JournalReader(open_place(location), is_settled=lambda key: key in settled, hints=hints)


def offsets(reader: JournalReader) -> list[tuple[str, int]]:
    return [(line.position.file, line.position.offset) for line in reader.lines()]


@pytest.fixture
def bucket() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield f"memory://{name}/run"
    fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def put_part(location: str, number: int, *tasks: int) -> None:
    data = b"".join(encode_line(trajectory(task)) for task in tasks)
    path = f"{location.removeprefix('memory:/')}/shard-00000/worker-00000-ab-{number:08d}.jsonl"
    fsspec.filesystem("memory").pipe_file(path, data)


def test_an_incomplete_last_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run", groups=1)
    reader = reader_of(str(run.path))
    first, second = encode_line(trajectory(0)), encode_line(trajectory(1))
    path = run.path / "shard-00000.jsonl"
    path.write_bytes(first + second[:40])
    assert offsets(reader) == [(path.name, 0)]
    assert offsets(reader) == []
    path.write_bytes(first + second)
    assert offsets(reader) == [(path.name, len(first))]


def test_parts_that_became_one_file_are_not_read_again(bucket: str) -> None:
    storage = open_storage(bucket)
    assert isinstance(storage, ObjectStorage)
    reader = reader_of(bucket)
    put_part(bucket, 1, 0, 1)
    put_part(bucket, 2, 2)
    assert len(offsets(reader)) == 3
    storage.compact("shard-00000")
    assert offsets(reader) == []
    # One that was not read is in the file, which is then read whole.
    put_part(bucket, 3, 3)
    storage.compact("shard-00000")
    assert len(offsets(reader)) >= 1
    assert offsets(reader) == []


def test_parts_that_are_settled_are_not_opened_by_the_next_reader(bucket: str) -> None:
    reader = reader_of(bucket)
    for number in (1, 2, 3):
        put_part(bucket, number, number)
    lines = list(reader.lines())
    # The second is needed still, and so is all that follows.
    hints = reader.hints(iter([lines[1].position]))
    assert hints["parts"] == {"shard-00000/worker-00000-ab-": 2}
    assert [name[-7] for name, _ in offsets(reader_of(bucket, hints))] == ["2", "3"]
    assert reader.hints(iter([NOWHERE]))["parts"] == {"shard-00000/worker-00000-ab-": 4}
    # What a reader has not come to yet is as the one before left it.
    assert reader_of(bucket, hints).hints(iter(())) == hints


def test_a_part_that_was_left_in_its_middle_is_read_again(bucket: str) -> None:
    reader = reader_of(bucket)
    put_part(bucket, 1, 0)
    put_part(bucket, 2, 1, 2, 3)
    put_part(bucket, 3, 4)
    lines = reader.lines()
    # A trainer takes what the first two lines complete, and saves its state.
    for _ in range(2):
        next(lines)
    hints = reader.hints(iter(()))
    assert hints["parts"] == {"shard-00000/worker-00000-ab-": 2}
    # Read to its end, it is settled.
    assert len(list(lines)) == 3
    assert reader.hints(iter(()))["parts"] == {"shard-00000/worker-00000-ab-": 4}
    assert [name[-7] for name, _ in offsets(reader_of(bucket, hints))] == ["2", "2", "2", "3"]


def test_files_may_vanish_while_they_are_listed(tmp_path: Path) -> None:
    """The end of a run compacts the folders of failures and dropped trajectories."""
    run = WrittenRun(tmp_path / "run", groups=1)
    reader, done = reader_of(str(run.path)), threading.Event()

    def compact() -> None:
        for number in range(60):
            (run.path / "failures").mkdir()
            (run.path / "failures" / f"worker-{number}.jsonl").write_bytes(b"{}\n")
            run.storage.compact("failures")
        done.set()

    thread = threading.Thread(target=compact)
    thread.start()
    while not done.is_set():
        list(reader.lines())
    thread.join()
    (path,) = {line.position.file for line in reader_of(str(run.path)).lines()}
    assert path == "failures.jsonl"
