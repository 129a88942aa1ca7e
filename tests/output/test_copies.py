"""The files of a run as they are handed out: whole lines, each file under one name, whatever it is stored as."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.record import TrajectoryRecord, decode_line, encode_line
from kuberoll_workers.output import copies as copies_module
from kuberoll_workers.output import records
from kuberoll_workers.output.copies import Copies, CopyBroken, Part, RunFile
from kuberoll_workers.output.storage import StorageError, open_storage
from tests.output.support import record


def listed(location: Path | str) -> dict[str, int]:
    """Bytes by name."""
    return {file.name: file.size for file in Copies(str(location)).files()}


def contents(location: Path | str, name: str, offset: int = 0) -> bytes:
    copies = Copies(str(location))
    (file,) = [file for file in copies.files() if file.name == name]
    return b"".join(copies.read(file, offset))


def test_the_files_of_a_run_and_no_others(tmp_path: Path) -> None:
    for name in ("manifest.json", "report.html", "shard-00001.jsonl", "shard-00000.parquet"):
        (tmp_path / name).write_bytes(b"12345\n")
    for name in (".lock", ".hidden.json", "notes.txt", "failures"):
        (tmp_path / name).write_bytes(b"12345\n")
    for name in ("turns", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_bytes(b"12345\n")
    (tmp_path / "link.json").symlink_to(tmp_path / "manifest.json")
    assert [file.name for file in Copies(f"{tmp_path}/").files()] == [
        "manifest.json",
        "report.html",
        "shard-00000.parquet",
        "shard-00001.jsonl",
    ]


def test_no_run_yet(tmp_path: Path) -> None:
    assert listed(tmp_path / "none") == {}
    (tmp_path / "file").write_bytes(b"")
    assert listed(tmp_path / "file" / "below") == {}
    assert listed("memory://copies-of-nothing") == {}


@pytest.mark.parametrize("location", ["xyz://a/b"])
def test_an_unknown_kind_of_place_is_named(location: str) -> None:
    with pytest.raises(StorageError, match=location):
        Copies(location)


@pytest.mark.parametrize("journal", ["shard-00003", "failures", "dropped"])
def test_a_journal_of_parts_is_one_file_of_its_whole_lines(tmp_path: Path, journal: str) -> None:
    folder = tmp_path / journal
    folder.mkdir()
    (tmp_path / f"{journal}.jsonl").write_bytes(b"zero\n")
    (folder / "b.jsonl").write_bytes(b"two\nthree\nfo")
    (folder / "a.jsonl").write_bytes(b"one\n")
    (folder / "c.jsonl").write_bytes(b"torn")
    (folder / "a.tmp").write_bytes(b"no\n")
    (folder / "d.jsonl").symlink_to(tmp_path / f"{journal}.jsonl")
    (folder / "e.jsonl").mkdir()
    assert contents(tmp_path, f"{journal}.jsonl") == b"zero\none\ntwo\nthree\n"
    assert listed(tmp_path) == {f"{journal}.jsonl": 19}


def test_a_journal_without_parts_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "shard-00000").mkdir()
    (tmp_path / "shard-00001").mkdir()
    (tmp_path / "shard-00001" / "a.jsonl").write_bytes(b"")
    assert listed(tmp_path) == {"shard-00001.jsonl": 0}


def test_what_grows_is_listed_anew(tmp_path: Path) -> None:
    copies = Copies(str(tmp_path))
    (tmp_path / "shard-00000.jsonl").write_bytes(b"one\n")
    (before,) = copies.files()
    (tmp_path / "shard-00000.jsonl").write_bytes(b"one\ntwo\nth")
    (after,) = copies.files()
    assert (before.size, after.size) == (4, 8)
    # What was listed stays readable as it was.
    assert b"".join(copies.read(before)) == b"one\n"


@given(
    parts=st.lists(st.binary(max_size=40), max_size=5),
    offset=st.integers(0, 200),
    chunk=st.integers(1, 16),
)
def test_any_offset_and_any_size_of_pieces(
    parts: list[bytes], offset: int, chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("parts")
    for number, data in enumerate(parts):
        (directory / str(number)).write_bytes(data + b"beyond what was listed")
    file = RunFile("x.jsonl", tuple(Part(f"{directory}/{number}", len(data)) for number, data in enumerate(parts)))
    whole = b"".join(parts)
    copies = Copies(str(directory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies_module, "CHUNK_BYTES", chunk)
        pieces = list(copies.read(file, offset))
        assert b"".join(pieces) == whole[offset:]
        assert all(0 < len(piece) <= chunk for piece in pieces)
        size = min(offset, len(whole))
        assert copies.digest(file, size) == hashlib.sha256(whole[:size]).hexdigest()
        # Nothing past what is asked for is read.
        assert file.size == len(whole)


def test_a_digest_reads_no_further_than_it_has_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "CHUNK_BYTES", 4)
    (tmp_path / "a").write_bytes(b"12345678")
    gone = RunFile("x", (Part(f"{tmp_path}/a", 8), Part(f"{tmp_path}/gone", 8)))
    assert Copies(str(tmp_path)).digest(gone, 8) == hashlib.sha256(b"12345678").hexdigest()


@given(data=st.binary(max_size=60) | st.lists(st.sampled_from([b"a", b"\n"]), max_size=60).map(b"".join))
def test_only_whole_lines_of_what_is_written_belong_to_a_copy(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("lines")
    (directory / "shard-00000.jsonl").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies_module, "CHUNK_BYTES", 7)
        assert contents(directory, "shard-00000.jsonl") == data[: data.rfind(b"\n") + 1]


def test_a_part_that_shrinks_or_goes_breaks_the_copy(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.jsonl"
    path.write_bytes(b"one\ntwo\n")
    copies = Copies(str(tmp_path))
    (file,) = copies.files()
    path.write_bytes(b"one\n")
    with pytest.raises(CopyBroken, match=r"shard-00000\.jsonl became shorter"):
        list(copies.read(file))
    path.unlink()
    with pytest.raises(CopyBroken, match=r"shard-00000\.jsonl was removed"):
        list(copies.read(file))


def lines_of(location: Path, shard: str) -> list[int]:
    lines = list(Copies(str(location)).trajectories(shard))
    assert all(line.endswith(b"\n") for line in lines)
    return [decode_line(line, TrajectoryRecord, where="x:1").task_index for line in lines]


def test_trajectories_of_any_format_are_lines_each_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "shard-00000.jsonl"
    path.write_bytes(b"".join(encode_line(record(task)) for task in (0, 1, 0)) + b"broken\n" + encode_line(record(2)))
    (tmp_path / "shard-00001.jsonl").write_bytes(encode_line(record(7)))
    assert Copies(str(tmp_path)).shards() == ["shard-00000", "shard-00001"]
    assert lines_of(tmp_path, "shard-00000") == [0, 1, 2]
    assert "shard-00000.jsonl:4" in caplog.text
    assert "is run again" in caplog.text
    records.to_parquet(open_storage(str(tmp_path)), "shard-00000")
    assert lines_of(tmp_path, "shard-00000") == [0, 1, 2]
    # As after a crash, or a resumed run, that left both.
    path.write_bytes(encode_line(record(1)) + encode_line(record(3)))
    assert lines_of(tmp_path, "shard-00000") == [0, 1, 2, 3]
    assert lines_of(tmp_path, "shard-00001") == [7]


def test_lines_are_handed_out_as_they_are(tmp_path: Path) -> None:
    line = encode_line(record(0)).replace(b'"rollout_index"', b' "rollout_index"', 1)
    (tmp_path / "shard-00000.jsonl").write_bytes(line)
    assert list(Copies(str(tmp_path)).trajectories("shard-00000")) == [line]
