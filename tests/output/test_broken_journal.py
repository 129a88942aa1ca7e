"""A journal that cannot write: every record that waits is told, whenever it came; what was told durable is there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.output.journal import BatchJournal, FileJournal, JournalBroken
from kuberoll_workers.output.part_journal import PartJournal, PartLimits
from tests.output.support import Observed, failure, record, store_at


class Gate:
    """A write that goes on, or fails, when the test says so."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self.fails = True

    def __call__(self, *_: Any) -> None:
        self.entered.set()
        assert self.go.wait(60)
        if self.fails:
            raise OSError(28, "No space left on device")


class Store:
    """A file system whose uploads go through a gate."""

    def __init__(self, gate: Callable[..., None]) -> None:
        self.pipe_file = gate

    def ls(self, folder: str, *, detail: bool) -> list[str]:
        return []


def file_journal(gate: Gate, tmp_path: Path) -> BatchJournal:
    journal = FileJournal(tmp_path / "shard-00000.jsonl", seconds=Observed())
    journal._write_and_sync = gate  # type: ignore[method-assign, assignment]
    return journal


def part_journal(gate: Gate, tmp_path: Path) -> BatchJournal:
    limits = PartLimits(max_bytes=1, attempts=1)
    return PartJournal(Store(gate), str(tmp_path), owner="a", seconds=Observed(), limits=limits)


@pytest.mark.parametrize("make", [file_journal, part_journal])
async def test_records_that_come_while_a_write_fails_fail_too(
    make: Callable[[Gate, Path], BatchJournal], tmp_path: Path
) -> None:
    gate = Gate()
    journal = make(gate, tmp_path)
    first = asyncio.create_task(journal.append(record(0)))
    await asyncio.to_thread(gate.entered.wait, 60)
    late = [asyncio.create_task(journal.append(record(index))) for index in range(1, 4)]
    await asyncio.sleep(0)
    gate.go.set()
    async with asyncio.timeout(240):
        results = await asyncio.gather(first, *late, return_exceptions=True)
    assert [type(result) for result in results] == [JournalBroken] * 4
    assert {str(result).partition(": ")[2] for result in results} == {"[Errno 28] No space left on device"}
    with pytest.raises(JournalBroken, match="No space left"):
        journal.add(record(9))
    with pytest.raises(JournalBroken, match="No space left"):
        await journal.close()


async def test_results_that_wait_for_room_hear_of_the_failure(tmp_path: Path) -> None:
    gate = Gate()
    store = store_at(tmp_path, turns=None, pending_bytes=0)
    store._journals["shard-00000"]._write_and_sync = gate  # type: ignore[attr-defined]
    first = asyncio.create_task(store.result(record(0)))
    await asyncio.to_thread(gate.entered.wait, 60)
    late = asyncio.create_task(store.result(record(1)))
    await asyncio.sleep(0)
    gate.go.set()
    async with asyncio.timeout(240):
        results = await asyncio.gather(first, late, return_exceptions=True)
    assert [type(result) for result in results] == [JournalBroken] * 2
    with pytest.raises(JournalBroken):
        await store.close()


async def test_a_journal_that_cannot_be_closed_keeps_no_other_from_it(tmp_path: Path) -> None:
    """Of two shards the first has no place for its file; what the second was given is written all the same."""
    store = store_at(tmp_path, shards=[0, 1], shard_count=2, turns=None)
    store._journals["shard-00000"]._path = tmp_path  # type: ignore[attr-defined]
    await store.result(record(0))
    await store.result(record(1))
    await store.result(failure(3))
    with pytest.raises(JournalBroken, match="shard-00000"):
        await store.close()
    assert (tmp_path / "shard-00001.jsonl").read_bytes().count(b"\n") == 1
    (other,) = (tmp_path / "failures").glob("*.jsonl")
    assert other.read_bytes().count(b"\n") == 1
    for journal in store._journals.values():
        assert journal._file is None  # type: ignore[attr-defined]


class _Scripted(BatchJournal):
    """Writes into a list; the n-th write may fail, and each write lasts for some turns of the event loop."""

    def __init__(self, failing: int | None, turns: Iterator[int]) -> None:
        super().__init__("scripted", seconds=Observed())
        self.lines: list[bytes] = []
        self._failing = failing
        self._turns = turns
        self._writes = 0

    async def _store(self, data: bytes) -> None:
        self._writes += 1
        for _ in range(next(self._turns, 0)):
            await asyncio.sleep(0)
        if self._writes == self._failing:
            raise OSError("broken")
        self.lines += data.splitlines()


@given(
    steps=st.lists(st.integers(min_value=0, max_value=4), max_size=30),
    failing=st.none() | st.integers(min_value=1, max_value=6),
    turns=st.lists(st.integers(min_value=0, max_value=5), max_size=10),
)
def test_every_record_is_durable_or_told_broken(steps: list[int], failing: int | None, turns: list[int]) -> None:
    """Each step adds a record and then gives the event loop so many turns; writes last for so many of them."""

    async def play() -> None:
        journal = _Scripted(failing, iter(turns))
        appends = []
        for index, pause in enumerate(steps):
            appends.append(asyncio.create_task(journal.append(record(index))))
            for _ in range(pause):
                await asyncio.sleep(0)
        async with asyncio.timeout(240):
            results = await asyncio.gather(*appends, return_exceptions=True)
            closed = await asyncio.gather(journal.close(), return_exceptions=True)
        durable = [result is None for result in results]
        assert all(result is None or isinstance(result, JournalBroken) for result in results)
        # What was told durable is there, in order, and nothing else is: no record is told broken and stored.
        assert len(journal.lines) == sum(durable)
        assert durable == sorted(durable, reverse=True)
        assert isinstance(closed[0], JournalBroken) == (not all(durable))

    asyncio.run(play())
