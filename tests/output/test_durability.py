"""What counts is on the disk, not only in the machine's memory; what is replaced is replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kuberoll_workers.output.journal import FileJournal, write_atomically
from kuberoll_workers.output.storage import DirectoryStorage
from tests.output.support import Observed, record


class Syncs:
    """The paths that were synced, in order; at each of them `look` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[Path] = []
        self.look: Callable[[Path], None] = lambda path: None
        sync = os.fsync

        def watched(descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            self.look(path)
            sync(descriptor)
            self.paths.append(path)

        monkeypatch.setattr(os, "fsync", watched)


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Syncs:
    return Syncs(monkeypatch)


async def test_a_record_counts_when_its_line_and_its_file_s_name_are_synced(syncs: Syncs, tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.jsonl"
    sizes: list[int] = []
    syncs.look = lambda synced: sizes.append(path.stat().st_size) if synced == path else None
    journal = FileJournal(path, seconds=Observed())
    for number in range(1, 4):
        await journal.append(record(number))
        # Synced after it was written, and before the caller was told.
        assert len(sizes) == number
        assert sizes[-1] == path.stat().st_size
    assert syncs.paths.count(tmp_path) == 1
    assert syncs.paths.index(tmp_path) < syncs.paths.index(path)
    await journal.close()


def test_a_torn_line_that_was_cut_off_stays_off(syncs: Syncs, tmp_path: Path) -> None:
    """Else a crash could bring its bytes back in front of the next record."""
    path = tmp_path / "shard-00000.jsonl"
    path.write_bytes(b"whole\n" + b"torn" * 50_000)
    sizes: list[int] = []
    syncs.look = lambda synced: sizes.append(path.stat().st_size)
    FileJournal(path, seconds=Observed())
    assert (syncs.paths, sizes, path.read_bytes()) == ([path], [6], b"whole\n")
    # What is whole is left alone.
    FileJournal(path, seconds=Observed())
    assert syncs.paths == [path]


async def test_turns_need_not_be_synced(syncs: Syncs, tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "turns.jsonl", seconds=Observed(), sync=False)
    await journal.append(record(0))
    await journal.close()
    assert syncs.paths == []


def _write(directory: Path, data: bytes) -> None:
    write_atomically(directory / "manifest.json", data)


def _upload(directory: Path, data: bytes) -> None:
    (directory / "made").write_bytes(data)
    DirectoryStorage(directory).upload("manifest.json", directory / "made")


@pytest.mark.parametrize("write", [_write, _upload])
def test_a_file_is_replaced_as_a_whole_once_its_contents_are_on_disk(
    syncs: Syncs, tmp_path: Path, write: Callable[[Path, bytes], None]
) -> None:
    path, new = tmp_path / "manifest.json", b"new" * 1_000_000
    path.write_bytes(b"old")
    seen: list[tuple[bool, bytes]] = []
    syncs.look = lambda synced: seen.append((synced == tmp_path, path.read_bytes()))
    write(tmp_path, new)
    # While the contents are synced the old file stands there; when its name is, the new one does.
    assert seen == [(False, b"old"), (True, new)]
    assert path.read_bytes() == new


@pytest.mark.parametrize("write", [_write, _upload])
def test_a_write_that_fails_leaves_the_old_file(
    syncs: Syncs, tmp_path: Path, write: Callable[[Path, bytes], None]
) -> None:
    def full(synced: Path) -> None:
        raise OSError(28, "No space left on device", str(synced))

    (tmp_path / "manifest.json").write_bytes(b"old")
    syncs.look = full
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, b"new")
    assert (tmp_path / "manifest.json").read_bytes() == b"old"
