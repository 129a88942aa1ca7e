"""What is in the journal counted; what counted is in the journal."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.record import RecordError, TrajectoryRecord, decode_line, encode_line
from kuberoll_workers.output import records
from kuberoll_workers.output.journal import BatchJournal, FileJournal, JournalBroken, repair, whole_lines
from kuberoll_workers.output.storage import DirectoryStorage
from tests.output.support import Observed, record


def stored(path: Path) -> list[TrajectoryRecord]:
    return list(records.trajectories(DirectoryStorage(path.parent), path.stem))


async def test_appended_records_are_read_back(tmp_path: Path) -> None:
    path, observed = tmp_path / "shard-00000.jsonl", Observed()
    journal = FileJournal(path, seconds=observed)
    await asyncio.gather(*(journal.append(record(index)) for index in range(100)))
    await journal.close()
    read = stored(path)
    assert [item.task_index for item in read] == list(range(100))
    assert encode_line(read[7]) == encode_line(record(7))
    # Group commit: those that arrive during a sync share the next one.
    assert 1 <= observed.count <= 3


async def test_a_record_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.jsonl"
    journal = FileJournal(path, seconds=Observed())
    for index in range(3):
        await journal.append(record(index))
        assert len({r.key for r in stored(path)}) == index + 1
    await journal.close()


async def test_nobody_else_appends_to_a_file_that_is_open(tmp_path: Path) -> None:
    """The lock of a shard may be lost to another machine: then the file's own lock decides whose lines it gets."""
    path = tmp_path / "shard-00000.jsonl"
    journal, other = (FileJournal(path, seconds=Observed()) for _ in range(2))
    await journal.append(record(0))
    with pytest.raises(JournalBroken, match="another process writes to this file"):
        await other.append(record(1))
    with pytest.raises(JournalBroken):
        await other.close()
    await journal.append(record(2))
    await journal.close()
    after = FileJournal(path, seconds=Observed())
    await after.append(record(3))
    await after.close()
    assert [item.task_index for item in stored(path)] == [0, 2, 3]


@given(cut=st.integers(min_value=0, max_value=3 * len(encode_line(record(0)))))
def test_a_torn_tail_is_cut_and_whole_lines_stay(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("journal") / "shard.jsonl"
    line = encode_line(record(0))
    path.write_bytes((line * 3)[:cut])
    repair(path)
    assert path.read_bytes() == line * (cut // len(line))


async def test_reopening_continues_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.jsonl"
    path.write_bytes(encode_line(record(0)) + encode_line(record(1))[:40])
    journal = FileJournal(path, seconds=Observed())
    await journal.append(record(2))
    await journal.close()
    assert [item.task_index for item in stored(path)] == [0, 2]


def test_foreign_lines_are_reported_with_file_and_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "shard-00000.jsonl"
    path.write_bytes(encode_line(record(0)) + b'{"task_index": "one"}\n')
    for _ in range(2):
        assert [item.task_index for item in stored(path)] == [0]
    assert caplog.text.count("shard-00000.jsonl:2: not a TrajectoryRecord") == 1


def test_logprobs_must_match_token_ids() -> None:
    line = encode_line(record(0)).replace(b"[-0.1,-1.5]", b"[-0.1]")
    with pytest.raises(RecordError, match=r"messages\[1\] has 2 token_ids but 1 logprobs"):
        decode_line(line, TrajectoryRecord, where="x:1")


def test_no_failures_file_is_no_failures(tmp_path: Path) -> None:
    assert list(records.failures(DirectoryStorage(tmp_path))) == []


async def test_a_full_disk_reaches_every_waiting_append(full_disk: Path) -> None:
    observed = Observed()
    journal = FileJournal(full_disk, seconds=observed)
    results = await asyncio.gather(*(journal.append(record(index)) for index in range(3)), return_exceptions=True)
    assert {type(result) for result in results} == {JournalBroken}
    assert observed.failures == 1
    with pytest.raises(JournalBroken, match="No space left"):
        await journal.close()


def test_a_failed_write_that_nobody_waits_for_is_reported_once(full_disk: Path) -> None:
    reports: list[object] = []

    async def write() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        journal = FileJournal(full_disk, seconds=Observed())
        journal.add(record(0))
        with pytest.raises(JournalBroken, match="No space left"):
            await journal.close()

    asyncio.run(write())
    # An error that nobody has seen is reported when its future is collected.
    gc.collect()
    assert reports == []


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbfone\n\n \n\xef\xbb\xbfthree\ntorn")
    assert list(whole_lines(path)) == [(f"{path}:1", b"one\n"), (f"{path}:4", b"\xef\xbb\xbfthree\n")]
    with pytest.raises(FileNotFoundError):
        list(whole_lines(tmp_path / "none"))


async def test_a_failure_between_two_writes_is_told_to_the_second() -> None:
    """The first batch was durable; what fails while the second is gathered is the second's alone."""

    class Journal(BatchJournal):
        def __init__(self) -> None:
            super().__init__("somewhere", seconds=Observed())
            self.gathered = 0
            self.lines: list[bytes] = []

        async def _gather(self) -> None:
            self.gathered += 1
            await asyncio.sleep(0)
            if self.gathered == 2:
                raise OSError("no room")

        async def _store(self, data: bytes) -> None:
            await asyncio.sleep(0)
            self.lines.append(data)
            late.append(self.add(record(1))[0])

    late: list[asyncio.Future[None]] = []
    journal = Journal()
    await journal.append(record(0))
    async with asyncio.timeout(240):
        with pytest.raises(JournalBroken, match="somewhere: no room"):
            await late[0]
        with pytest.raises(JournalBroken, match="somewhere: no room"):
            await journal.close()
    assert journal.lines == [encode_line(record(0))]


async def test_a_closed_journal_holds_no_file(tmp_path: Path) -> None:
    def held() -> list[Path]:
        links = (Path(entry.path) for entry in os.scandir("/proc/self/fd"))
        return [target for target in (Path(os.path.realpath(link)) for link in links) if target == path]

    path = tmp_path / "shard-00000.jsonl"
    journal = FileJournal(path, seconds=Observed())
    await journal.append(record(0))
    assert held() == [path]
    await journal.close()
    assert held() == []
