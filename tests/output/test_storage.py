"""The same run, in a directory and in a real object store: nothing lost, nothing twice, whatever fails."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryRecord, encode_line
from kuberoll_workers.output import records
from kuberoll_workers.output import storage as storage_module
from kuberoll_workers.output.copies import Copies
from kuberoll_workers.output.journal import JournalBroken
from kuberoll_workers.output.part_journal import PartJournal, PartLimits
from kuberoll_workers.output.run_files import NotARun, RunFiles
from kuberoll_workers.output.storage import ObjectStorage, Storage, StorageError, open_storage
from tests.output.s3 import S3Server, s3, s3_server
from tests.output.support import Observed, dropped, failure, record

__all__ = ["s3", "s3_server"]

QUICK = PartLimits(max_seconds=0.01, backoff_seconds=0.01, attempts=4)
SHARD = records.shard_name(0)


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.slow), "memory"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')[1]}/deep/run"
    return str(tmp_path) if request.param == "directory" else f"memory://{tmp_path.name}/run"


def keys(storage: Storage, shard: str = SHARD) -> list[int]:
    return [item.task_index for item in records.trajectories(storage, shard)]


async def store(storage: Storage, *numbers: int, name: str = SHARD, owner: str = "a") -> None:
    journal = storage.journal(name, owner=owner, seconds=Observed())
    await asyncio.gather(*(journal.append(record(number)) for number in numbers))
    await journal.close()


async def test_what_was_appended_is_read_back(location: str) -> None:
    storage = open_storage(location, parts=QUICK)
    assert (storage.shards(), list(records.failures(storage)), storage.read("manifest.json")) == ([], [], None)
    await store(storage, 0, 1)
    await store(storage, 2)
    assert keys(open_storage(location)) == [0, 1, 2]
    assert storage.shards() == [SHARD]
    storage.write("manifest.json", b"{}")
    storage.write("manifest.json", b"{1}")
    assert storage.read("manifest.json") == b"{1}"
    first = next(iter(records.trajectories(storage, SHARD)))
    assert encode_line(first) == encode_line(record(0))


async def test_several_writers_of_one_journal(location: str) -> None:
    storage = open_storage(location, parts=QUICK)
    journals = [storage.journal(records.FAILURES, owner=owner, seconds=Observed(), shared=True) for owner in ("a", "b")]
    for number in range(4):
        await journals[number % 2].append(failure(number))
    for journal in journals:
        await journal.close()
    assert sorted(item.task_index for item in records.failures(storage)) == [0, 1, 2, 3]
    storage.compact(records.FAILURES)
    assert sorted(item.task_index for item in records.failures(storage)) == [0, 1, 2, 3]
    assert [Path(file).name for file in storage.files()] == ["failures.jsonl"]


def test_who_begins_to_write_leaves_the_unfinished_lines_of_others_alone(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    (tmp_path / "failures").mkdir()
    torn = encode_line(failure(4)) + encode_line(failure(5))[:20]
    (tmp_path / "failures" / "b.jsonl").write_bytes(torn)
    storage.journal(records.FAILURES, owner="c", seconds=Observed(), shared=True)
    assert (tmp_path / "failures" / "b.jsonl").read_bytes() == torn
    assert [item.task_index for item in records.failures(storage)] == [4]


@pytest.mark.parametrize("parquet", [False, True])
async def test_a_finished_shard_is_one_file_and_can_be_added_to(location: str, parquet: bool) -> None:
    storage = open_storage(location, parts=QUICK)

    def finish() -> None:
        if parquet:
            records.to_parquet(storage, SHARD)
        else:
            storage.compact(SHARD)

    for number in range(3):
        await store(storage, number)
    before = [encode_line(item) for item in records.trajectories(storage, SHARD)]
    finish()
    finish()
    assert [encode_line(item) for item in records.trajectories(storage, SHARD)] == before
    assert [Path(file).name for file in storage.files()] == [f"{SHARD}.{'parquet' if parquet else 'jsonl'}"]
    assert storage.shards() == [SHARD]
    await store(storage, 3)
    assert keys(storage) == [0, 1, 2, 3]
    finish()
    assert keys(storage) == [0, 1, 2, 3]
    assert len(storage.files()) == 1


async def test_parquet_made_and_journal_not_yet_removed(location: str) -> None:
    storage = open_storage(location, parts=QUICK)
    await store(storage, 0, 1)
    records.to_parquet(storage, SHARD)
    # As after a crash between the two steps.
    await store(storage, 0, 1)
    run = RunFiles(location)
    trajectories = run.read()
    assert [item.task_index for item in trajectories] == [0, 1]
    assert trajectories.precedence.duplicates == 2
    records.to_parquet(storage, SHARD)
    assert keys(storage) == [0, 1]


async def test_a_second_run_is_kept_out(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "_HEARTBEAT_SECONDS", 0.5)
    one, other = open_storage(location), open_storage(location)
    one.lock()
    with pytest.raises(StorageError, match="in use by another run"):
        other.lock()
    one.unlock()
    other.lock()
    other.unlock()
    assert open_storage(location).files() == []


def test_a_lease_lapses_by_the_store_s_clock(s3: tuple[S3Server, str], monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "object-stores.md").read_text()
    page = " ".join(page.split())
    beat, stale = storage_module._HEARTBEAT_SECONDS, storage_module._STALE_SECONDS
    assert f"renews every {beat:.0f} seconds. The lock of a run that died expires after {stale:.0f} seconds" in page
    storage = open_storage(s3[1])
    storage.write(".lock", b'{"owner": "somebody"}')
    assert isinstance(storage, ObjectStorage)
    # Nobody waits to see whether it is renewed.
    monkeypatch.setattr(storage, "_is_renewed", lambda _held: True)
    with pytest.raises(StorageError, match="in use by another run"):
        storage.lock()
    monkeypatch.setattr(storage_module, "_STALE_SECONDS", 0.0)
    storage.lock()
    storage.unlock()
    assert storage._fs.find(s3[1]) == []


async def test_parts_are_bounded_by_bytes(s3: tuple[S3Server, str]) -> None:
    server, uri = s3
    size = len(encode_line(record(0)))
    storage = open_storage(uri, parts=PartLimits(max_bytes=3 * size, max_seconds=3600))
    journal = storage.journal(SHARD, owner="a", seconds=Observed())
    server.puts.clear()
    await asyncio.gather(*(journal.append(record(number)) for number in range(3)))
    assert len(server.puts) == 1
    # The fourth is written at the end, not after an hour.
    written, _ = journal.add(record(3))
    await journal.close()
    assert written.done()
    assert len(server.puts) == 2
    assert keys(storage) == [0, 1, 2, 3]


class Listed:
    """A store that lists these names and takes uploads, of which the first ones fail."""

    def __init__(self, *names: str, failing: int = 0) -> None:
        self.names = names
        self.failing = failing
        self.uploads: list[str] = []

    def ls(self, folder: str, *, detail: bool) -> list[str]:
        return [f"{folder}/{name}" for name in self.names]

    def pipe_file(self, path: str, data: bytes) -> None:
        self.uploads.append(path)
        if len(self.uploads) <= self.failing:
            raise OSError("not now")


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ((), 1),
        (("a-00000001.jsonl", "a-00000009.jsonl", "a-00000003.jsonl"), 10),
        (("b-00000009.jsonl", "x-a-00000009.jsonl", "a-notes.jsonl", "a-.jsonl", "notes"), 1),
    ],
)
async def test_a_writer_goes_on_after_its_own_parts(names: tuple[str, ...], first: int) -> None:
    store = Listed(*names)
    journal = PartJournal(store, "run/shard", owner="a", seconds=Observed(), limits=QUICK)
    for number in range(2):
        await journal.append(record(number))
    await journal.close()
    assert store.uploads == [f"run/shard/a-{first + number:08d}.jsonl" for number in range(2)]


async def test_records_that_come_soon_after_one_another_are_one_part() -> None:
    store = Listed()
    limits = PartLimits(max_seconds=3600)
    journal = PartJournal(store, "run/shard", owner="a", seconds=Observed(), limits=limits)
    for number in range(3):
        journal.add(record(number))
        for _ in range(5):
            await asyncio.sleep(0)
    assert store.uploads == []
    await journal.close()
    assert len(store.uploads) == 1


async def test_waits_between_uploads_double_to_half_a_minute() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    store, observed = Listed(failing=9), Observed()
    limits = PartLimits(max_bytes=1, attempts=10, backoff_seconds=1.0)
    journal = PartJournal(store, "run/shard", owner="a", seconds=observed, limits=limits, sleep=sleep)
    await journal.append(record(0))
    await journal.close()
    longest = [1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))
    assert set(store.uploads) == {"run/shard/a-00000001.jsonl"}
    assert (observed.count, observed.failures) == (1, 9)


def test_a_file_s_uri_is_its_directory(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}")
    assert storage.location == str(tmp_path)
    assert storage.where("manifest.json") == f"{tmp_path}/manifest.json"
    assert storage.where("failures") == f"{tmp_path}/failures.jsonl"


def test_workers_of_one_shard_keep_each_other_out(tmp_path: Path) -> None:
    """Locks are the processes': the other worker is a process of its own."""
    one = open_storage(str(tmp_path))
    one.hold_shards([0, 2])
    program = (
        "import sys\n"
        "from kuberoll_workers.output import storage\n"
        "place = storage.open_storage(sys.argv[1])\n"
        "place.hold_shards([1, 3])\n"
        "try:\n"
        "    place.hold_shards([3, 2])\n"
        "except storage.StorageError as error:\n"
        "    print(error)\n"
    )

    def other() -> str:
        return subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
        ).stdout

    assert f"{tmp_path}: another worker" in (refusal := other())
    assert refusal.endswith("is still writing shard 2\n")
    one.release_shards()
    one.release_shards()
    assert other() == ""


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_volumes_without_locks_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def without(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", without)
    storage = open_storage(str(tmp_path))
    storage.hold_shards([0, 1])
    storage.release_shards()


def test_a_lock_that_fails_is_an_error_and_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "lockf", broken)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        open_storage(str(tmp_path)).hold_shards([0])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("status", ["503 Slow Down", "500 Internal Server Error"])
async def test_uploads_that_fail_are_tried_again(s3: tuple[S3Server, str], status: str) -> None:
    server, uri = s3
    server.status, server.fail_next = status, 2
    storage = open_storage(uri, parts=QUICK)
    await store(storage, 0, 1)
    assert server.fail_next == 0
    assert keys(storage) == [0, 1]


async def test_an_upload_that_arrived_but_was_not_answered_is_there_once(s3: tuple[S3Server, str]) -> None:
    server, uri = s3
    server.lose_next = 1
    storage = open_storage(uri, parts=QUICK)
    await store(storage, 0)
    assert server.lose_next == 0
    assert keys(storage) == [0]


@pytest.mark.slow
async def test_a_store_that_stays_away_is_told_to_everyone_who_waits(s3: tuple[S3Server, str]) -> None:
    server, uri = s3
    storage = open_storage(uri, parts=QUICK)
    await store(storage, 0)
    server.fail_next = 10**6
    journal = storage.journal(SHARD, owner="a", seconds=Observed())
    results: list[Any] = await asyncio.gather(*(journal.append(record(n)) for n in (1, 2)), return_exceptions=True)
    assert [type(result) for result in results] == [JournalBroken, JournalBroken]
    with pytest.raises(JournalBroken, match=SHARD):
        await journal.append(record(3))
    with pytest.raises(JournalBroken):
        await journal.close()
    server.fail_next = 0
    assert keys(storage) == [0]


async def test_slow_uploads_hold_nobody_up_and_become_larger(s3: tuple[S3Server, str]) -> None:
    server, uri = s3
    storage = open_storage(uri, parts=QUICK)
    journal = storage.journal(SHARD, owner="a", seconds=Observed())
    server.puts.clear()
    server.held.clear()
    server.waiting.clear()
    first, _ = journal.add(record(0))
    await asyncio.to_thread(server.waiting.wait)
    rest = [journal.add(record(number))[0] for number in range(1, 50)]
    assert not first.done()
    server.held.set()
    await asyncio.gather(first, *rest)
    await journal.close()
    assert len(server.puts) == 2
    assert keys(storage) == list(range(50))


def test_nothing_there_is_said(s3: tuple[S3Server, str], tmp_path: Path) -> None:
    for location in (s3[1], "s3://no-such-bucket/x", str(tmp_path / "no"), "memory://nowhere"):
        with pytest.raises(NotARun, match=location):
            RunFiles(location)
    with pytest.raises(NotARun, match="xyz"):
        RunFiles("xyz://a/b")


def test_what_others_write_is_seen(s3: tuple[S3Server, str]) -> None:
    """Workers list the same places as other machines write to: nothing of an earlier list may stand for the present."""
    server, uri = s3
    storage, copies = open_storage(f"{uri}/run", parts=QUICK), Copies(f"{uri}/run")
    assert (storage.shards(), storage.files(), copies.files()) == ([], [], [])
    for number in range(2):
        url = f"{server.url}/{uri.removeprefix('s3://')}/run/shard-{number:05d}.jsonl"
        with urllib.request.urlopen(urllib.request.Request(url, data=b"{}\n", method="PUT")) as answer:
            assert answer.status == 200
        names = [f"shard-{written:05d}" for written in range(number + 1)]
        assert storage.shards() == names
        assert [Path(file).stem for file in storage.files()] == names
        assert [file.name for file in copies.files()] == [f"{name}.jsonl" for name in names]


def test_parts_are_of_the_size_and_the_age_that_the_docs_say() -> None:
    assert PartLimits() == PartLimits(max_bytes=32 * 2**20, max_seconds=15.0, attempts=8, backoff_seconds=0.5)


def test_no_bucket_no_lock(s3: tuple[S3Server, str]) -> None:
    with pytest.raises(StorageError, match="no-such-bucket"):
        open_storage("s3://no-such-bucket/run").lock()


async def test_failures_and_dropped_are_read_from_anywhere(location: str) -> None:
    storage = open_storage(location, parts=QUICK)
    for name, item in ((records.FAILURES, failure(1)), (records.DROPPED, dropped(2))):
        journal = storage.journal(name, owner="a", seconds=Observed())
        await journal.append(item)
        await journal.close()
    await store(storage, 0)
    kinds = [(type(item), item.task_index) for item in RunFiles(location).read()]
    assert kinds == [(TrajectoryRecord, 0), (FailureRecord, 1), (DroppedRecord, 2)]


@pytest.mark.parametrize("held", [b"", b"\0" * 80, b'{"owner": "x", "beat": "FUTURE"}'])
def test_a_lock_object_that_nobody_renews_lapses(
    held: bytes, s3: tuple[S3Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "_HEARTBEAT_SECONDS", 0.1)
    storage = open_storage(f"{s3[1]}/run")
    storage.write(".lock", held)
    storage.lock()
    storage.unlock()


@pytest.mark.parametrize("seconds", [-120.0, 3 * 3600.0])
def test_a_lock_that_is_renewed_keeps_others_out_whatever_the_clocks_say(
    s3: tuple[S3Server, str], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    first, second = open_storage(f"{s3[1]}/run"), open_storage(f"{s3[1]}/run")
    with monkeypatch.context() as patch:
        patch.setattr(storage_module, "_HEARTBEAT_SECONDS", 0.2)
        patch.setattr(time, "time", lambda now=time.time: now() + seconds)
        first.lock()
    with pytest.raises(StorageError, match="in use by another run"):
        second.lock()
    first.unlock()


def test_a_run_that_stood_still_finds_out_before_it_writes(
    s3: tuple[S3Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, worker, second = (open_storage(f"{s3[1]}/run", parts=QUICK) for _ in range(3))
    with monkeypatch.context() as patch:
        # It is paused: it renews nothing.
        patch.setattr(storage_module, "_HEARTBEAT_SECONDS", 3600.0)
        first.lock()
        worker.hold_shards([0])
        first.write("manifest.json", b"1")
        worker.write("shard-00000.jsonl", encode_line(record(0)))
        patch.setattr(storage_module, "_STALE_SECONDS", 0.0)
        second.lock()
    second.write("manifest.json", b"2")
    for late in (first, worker):
        for change in (
            lambda late=late: late.write("manifest.json", b"3"),
            lambda late=late: late.remove_files(late.journal_files(SHARD)),
            lambda late=late: records.to_parquet(late, SHARD),
        ):
            with pytest.raises(StorageError, match="was taken over by another run while this one stood still"):
                change()
    first.unlock()
    assert (second.read("manifest.json"), keys(second)) == (b"2", [0])
    second.write("manifest.json", b"4")
    second.unlock()
    assert second.read(".lock") is None


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EAGAIN, "in use by another run"),
        (errno.EOPNOTSUPP, r"\.lock: cannot be locked: Operation not supported; .* file system with locks"),
        (errno.ENOLCK, r"\.lock: cannot be locked: No locks available"),
    ],
)
def test_why_a_directory_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def without(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.raises(StorageError, match=said):
        open_storage(str(tmp_path)).lock()


@pytest.mark.parametrize("parquet", [False, True])
@pytest.mark.parametrize("read", range(4))
async def test_readers_see_every_line_whatever_is_merged_meanwhile(location: str, read: int, parquet: bool) -> None:
    storage = open_storage(location, parts=QUICK)
    for number in range(3):
        await store(storage, number, owner=f"worker-{number}")
    plain, counted = records.trajectories(storage, SHARD), iter(RunFiles(location).read())
    begun = [[next(reader).task_index for _ in range(read)] for reader in (plain, counted)]
    if parquet:
        records.to_parquet(storage, SHARD)
    else:
        storage.compact(SHARD)
    rest = [[item.task_index for item in reader] for reader in (plain, counted)]
    assert {*begun[0], *rest[0]} == {0, 1, 2}
    assert sorted([*begun[1], *rest[1]]) == [0, 1, 2]


async def test_what_another_worker_adds_during_a_conversion_stays(location: str) -> None:
    storage, other = open_storage(location, parts=QUICK), open_storage(location, parts=QUICK)
    await store(storage, 0)
    files = storage.journal_files(SHARD)
    await store(other, 1, owner="b")
    storage.remove_files(files if "://" in location else [])
    assert 1 in keys(storage)


async def test_a_consumer_that_writes_while_its_run_ends_loses_nothing(location: str) -> None:
    storage = open_storage(location, parts=QUICK)
    for owner, number in (("worker-00000", 0), ("consumer-a", 1)):
        journal = storage.journal(records.DROPPED, owner=owner, seconds=Observed(), shared=True)
        await journal.append(dropped(number))
        if number == 0:
            await journal.close()
    storage.compact(records.DROPPED)
    await journal.append(dropped(2))
    storage.compact(records.DROPPED)
    await journal.append(dropped(3))
    await journal.close()
    storage.compact(records.DROPPED)
    assert sorted(item.task_index for item in records.dropped(storage)) == [0, 1, 2, 3]


def test_a_torn_or_blank_line_of_a_part_is_none(tmp_path: Path) -> None:
    storage = open_storage(f"memory://{tmp_path.name}/run")
    line = encode_line(record(0))
    storage.write(f"{SHARD}/a-00000001.jsonl", line + b"\n  \n" + line[:-1])
    assert [text for _, text in storage.lines(SHARD)] == [line]


@pytest.mark.parametrize("held", [b"[1]", b"{}", b'"text"', b"text", b"1"])
def test_a_foreign_lock_object_is_named_and_left_alone(held: bytes, s3: tuple[S3Server, str]) -> None:
    storage = open_storage(f"{s3[1]}/run")
    storage.write(".lock", held)
    with pytest.raises(StorageError, match=r"/\.lock is not a lock of KubeRoll: remove it"):
        storage.lock()
    assert storage.read(".lock") == held


async def test_who_lets_go_of_a_lock_that_somebody_removed_is_not_troubled(location: str) -> None:
    storage = open_storage(location)
    storage.lock()
    if isinstance(storage, ObjectStorage):
        storage._fs.rm_file(f"{storage._root}/.lock")
    else:
        (Path(location) / ".lock").unlink()
    storage.unlock()
    storage.unlock()
    other = open_storage(location)
    other.lock()
    other.unlock()


def test_a_lease_that_cannot_be_renewed_for_a_moment_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "_HEARTBEAT_SECONDS", 0.01)
    storage = open_storage(f"memory://{tmp_path.name}/run")
    assert isinstance(storage, ObjectStorage)
    renew, renewals, again = storage._renew, list[None](), threading.Event()

    def sometimes() -> None:
        renewals.append(None)
        if len(renewals) == 2:
            raise OSError("not now")
        renew()
        if len(renewals) > 2:
            again.set()

    monkeypatch.setattr(storage, "_renew", sometimes)
    storage.lock()
    assert again.wait(60)
    storage.unlock()
    assert storage.read(".lock") is None


async def test_files_of_a_run_are_written_by_their_owner_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        storage = open_storage(str(tmp_path))
        storage.lock()
        storage.hold_shards([0])
        await store(storage, 0)
        storage.release_shards()
        storage.unlock()
    finally:
        os.umask(mask)
    storage_paths = [Path(entry.path) for entry in os.scandir(tmp_path)]
    modes = {path.name: path.stat().st_mode & 0o777 for path in storage_paths}
    assert modes == {".lock": 0o644, ".shards.lock": 0o644, f"{SHARD}.jsonl": 0o644}
