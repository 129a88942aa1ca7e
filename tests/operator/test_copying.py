"""The output of a run, copied from real readers over connections that break."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_operator.console import copying
from kuberoll_operator.console.copying import Copy, Outcome, Stream
from kuberoll_operator.console.errors import ConsoleError
from kuberoll_operator.console.local_files import RECORD, Action, Contents, CopyRecord, contents_of, decide
from kuberoll_workers.data.record import encode_line
from kuberoll_workers.output.storage import open_storage
from tests.operator.readers import Readers
from tests.output.s3 import S3Server, s3, s3_server
from tests.output.support import record

pytestmark = pytest.mark.slow

__all__ = ["s3", "s3_server"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are tried again without waiting."""
    monkeypatch.setattr(
        copying.retry_connection, "__kwdefaults__", {"attempts": copying.ATTEMPTS, "retry_seconds": 0.0}
    )


class Notes:
    """Progress, kept."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int | None, int]] = []
        self.notes: list[str] = []

    def begin(self, name: str, size: int | None, done: int) -> None:
        self.begun.append((name, size, done))

    def advance(self, size: int) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A run that has ended, as it lies on a claim."""
    path = tmp_path / "claim" / "first"
    path.mkdir(parents=True)
    for shard in range(2):
        # More than is sent at once.
        lines = [encode_line(record(task, metadata={"state": "x" * 4000})) for task in range(shard, 200, 2)]
        (path / f"shard-{shard:05d}.jsonl").write_bytes(b"".join(lines))
    (path / "manifest.json").write_text('{"format": 1}')
    (path / "aggregate_metrics.json").write_text("{}")
    (path / "report.html").write_bytes(bytes(range(256)) * 4096)
    (path / ".lock").write_text("")
    (path / "turns").mkdir()
    (path / "turns" / "shard-00000-1.jsonl").write_text("{}\n")
    return path


NAMES = ["aggregate_metrics.json", "manifest.json", "report.html", "shard-00000.jsonl", "shard-00001.jsonl"]


async def copy(
    readers: Readers,
    target: Path,
    *,
    snapshot: bool = False,
    force: bool = False,
    include: tuple[str, ...] = (),
    run: str = "ns/first uid",
) -> tuple[Outcome, Notes]:
    notes = Notes()
    made = Copy(target, run=run, snapshot=snapshot, force=force, include=include, progress=notes)
    return await made.run(readers.connect), notes


def same(output: Path, target: Path, names: list[str] = NAMES) -> bool:
    return all((output / name).read_bytes() == (target / name).read_bytes() for name in names)


def listing(target: Path) -> list[str]:
    return sorted(path.name for path in target.iterdir())


async def test_all_files_of_a_run_and_nothing_else(output: Path, tmp_path: Path) -> None:
    outcome, _ = await copy(Readers(output, tmp_path), tmp_path / "here")
    assert outcome == Outcome(NAMES, [])
    assert same(output, tmp_path / "here")
    assert listing(tmp_path / "here") == sorted([*NAMES, RECORD])


async def test_the_same_again_copies_nothing(output: Path, tmp_path: Path) -> None:
    readers = Readers(output, tmp_path)
    await copy(readers, tmp_path / "here")
    outcome, notes = await copy(readers, tmp_path / "here")
    assert outcome == Outcome([], NAMES)
    assert notes.begun == []


async def test_patterns_choose_files(output: Path, tmp_path: Path) -> None:
    outcome, _ = await copy(Readers(output, tmp_path), tmp_path / "here", include=("agg*", "*.html"))
    assert outcome.fetched == ["aggregate_metrics.json", "report.html"]
    with pytest.raises(ConsoleError, match=r"nothing that matches \*\.csv at .*first yet"):
        await copy(Readers(output, tmp_path), tmp_path / "here", include=("*.csv",))


async def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    with pytest.raises(ConsoleError, match=r"there is nothing at .*none yet"):
        await copy(Readers(tmp_path / "none", tmp_path), tmp_path / "here")
    assert not (tmp_path / "here").exists()


async def test_a_connection_that_is_cut_anywhere_costs_nothing(output: Path, tmp_path: Path) -> None:
    readers = Readers(output, tmp_path)
    readers.cut_after = [50, 600, 70_000, 300_000, 900_000]
    outcome, notes = await copy(readers, tmp_path / "here")
    assert same(output, tmp_path / "here")
    assert sorted(set(outcome.fetched)) == NAMES
    assert readers.connections == 6
    # It goes on within a file, not from its beginning.
    assert any(done > 0 for _, _, done in notes.begun)
    assert listing(tmp_path / "here") == sorted([*NAMES, RECORD])


async def test_an_interrupted_copy_is_gone_on_with_by_the_next(output: Path, tmp_path: Path) -> None:
    readers = Readers(output, tmp_path)
    readers.cut_after = [700_000] + [50] * copying.ATTEMPTS
    with pytest.raises(ConsoleError, match=r"5 times in a row.*the same command resumes there"):
        await copy(readers, tmp_path / "here")
    left = tmp_path / "here" / "report.html.partial"
    size = left.stat().st_size
    assert 0 < size < (output / "report.html").stat().st_size
    assert not (tmp_path / "here" / "report.html").exists()
    _, notes = await copy(readers, tmp_path / "here")
    assert ("report.html", 1 << 20, size) in notes.begun
    assert same(output, tmp_path / "here")


async def test_bytes_that_change_on_the_way_are_noticed(output: Path, tmp_path: Path) -> None:
    readers = Readers(output, tmp_path)
    bent = iter([True])

    def bend(data: bytes) -> bytes:
        # Once, in the middle of the report.
        return (
            data.replace(b"\x41\x42\x43", b"\x41\x00\x43", 1)
            if b"\xfe\xff\x00\x01" in data and next(bent, False)
            else data
        )

    readers.bend = bend
    _, notes = await copy(readers, tmp_path / "here")
    assert any("the data was corrupted on the way" in text for text in notes.notes)
    assert same(output, tmp_path / "here")


async def test_other_files_here_are_left_alone_and_nothing_is_copied(output: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "report.html").write_text("mine")
    with pytest.raises(
        ConsoleError, match=r"has different files with these names.*: report\.html; .*--force"
    ) as refused:
        await copy(Readers(output, tmp_path), here)
    assert refused.value.code == 2
    assert listing(here) == ["report.html"]
    assert (here / "report.html").read_text() == "mine"
    await copy(Readers(output, tmp_path), here, force=True)
    assert same(output, here)


async def test_a_link_here_is_not_followed(output: Path, tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    (here / "report.html").symlink_to(elsewhere)
    with pytest.raises(ConsoleError, match="different files"):
        await copy(Readers(output, tmp_path), here, force=True)
    assert not elsewhere.exists()


async def test_a_snapshot_has_whole_lines_and_grows_into_the_end(output: Path, tmp_path: Path) -> None:
    readers, here, shard = Readers(output, tmp_path), tmp_path / "here", output / "shard-00000.jsonl"
    everything = shard.read_bytes()
    half = everything.index(b"\n", len(everything) // 2) + 1
    shard.write_bytes(everything[: half + 10])
    (output / "failures").mkdir()
    (output / "failures" / "b.jsonl").write_bytes(b'{"b":1}\n')
    (output / "report.html").unlink()
    await copy(readers, here, snapshot=True)
    assert (here / "shard-00000.jsonl").read_bytes() == everything[:half]
    assert (here / "failures.jsonl").read_bytes() == b'{"b":1}\n'

    # Another worker's failures come before those that were there.
    (output / "failures" / "a.jsonl").write_bytes(b'{"a":1}\n')
    shard.write_bytes(everything)
    open_storage(str(output)).compact("failures")
    _, notes = await copy(readers, here)
    assert (here / "failures.jsonl").read_bytes() == b'{"a":1}\n{"b":1}\n'
    assert (here / "shard-00000.jsonl").read_bytes() == everything
    assert ("shard-00000.jsonl", len(everything), half) in notes.begun


async def test_a_snapshot_that_was_edited_is_not_replaced(output: Path, tmp_path: Path) -> None:
    readers, here = Readers(output, tmp_path), tmp_path / "here"
    await copy(readers, here, snapshot=True)
    (here / "manifest.json").write_text("edited")
    with pytest.raises(ConsoleError, match=r"manifest\.json"):
        await copy(readers, here, snapshot=True)


async def test_a_snapshot_of_another_run_is_not_replaced(output: Path, tmp_path: Path) -> None:
    readers, here = Readers(output, tmp_path), tmp_path / "here"
    await copy(readers, here, snapshot=True, run="ns/first old")
    (output / "manifest.json").write_text('{"format": 1, "other": true}')
    with pytest.raises(ConsoleError, match=r"manifest\.json"):
        await copy(readers, here, run="ns/first new")
    await copy(readers, here, run="ns/first new", force=True)
    assert same(output, here)


async def test_links_in_the_output_are_not_copied(output: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("secret")
    (output / "stolen.json").symlink_to(tmp_path / "secret.json")
    outcome, _ = await copy(Readers(output, tmp_path), tmp_path / "here")
    assert outcome.fetched == NAMES


@pytest.mark.parametrize("name", ["../x.json", ".bashrc", "a/b.json", "", "x\n.json"])
async def test_names_that_lead_elsewhere_are_refused(name: str, output: Path, tmp_path: Path) -> None:
    readers = Readers(output, tmp_path)
    readers.bend = lambda data: data.replace(b'"report.html"', json.dumps(name).encode())
    with pytest.raises(ConsoleError, match="is not a safe file name"):
        await copy(readers, tmp_path / "here")
    assert not (tmp_path / "here").exists()


async def test_an_object_store_while_it_is_written_and_after(
    s3: tuple[S3Server, str], output: Path, tmp_path: Path
) -> None:
    import fsspec

    _, bucket = s3
    store = fsspec.filesystem("s3")
    location = f"{bucket}/run"
    text = (output / "shard-00000.jsonl").read_bytes()
    cut = text.index(b"\n", 5000) + 1
    store.pipe_file(f"{location}/manifest.json", b"{}")
    store.pipe_file(f"{location}/shard-00000/0001-a.jsonl", text[:cut])
    readers, here = Readers(location, tmp_path), tmp_path / "here"
    await copy(readers, here, snapshot=True)
    assert (here / "shard-00000.jsonl").read_bytes() == text[:cut]
    store.pipe_file(f"{location}/shard-00000/0002-a.jsonl", text[cut:])
    open_storage(location).compact("shard-00000")
    await copy(readers, here)
    assert (here / "shard-00000.jsonl").read_bytes() == text
    assert listing(here) == [RECORD, "manifest.json", "shard-00000.jsonl"]


def all_shards(output: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(output.glob("shard-*")))


async def streamed(readers: Readers) -> bytes:
    out = io.BytesIO()
    await Stream(out, note=lambda _: None).run(readers.connect)
    return out.getvalue()


async def test_the_stream_has_every_trajectory_once(output: Path, tmp_path: Path) -> None:
    shard = output / "shard-00000.jsonl"
    whole = shard.read_bytes() + (output / "shard-00001.jsonl").read_bytes()
    # What a crash while journals are made one file leaves, lines twice and a torn one; and one that cannot be read.
    first = shard.read_bytes().splitlines(keepends=True)
    shard.write_bytes(b"".join([*first, *first[:7], b'{"not": "a trajectory"}\n', b'{"task_ind']))
    assert await streamed(Readers(output, tmp_path)) == whole


async def test_the_stream_goes_on_after_a_cut(output: Path, tmp_path: Path) -> None:
    whole = all_shards(output)
    readers = Readers(output, tmp_path)
    readers.cut_after = [100, 300_000, 300_000, 200_000]
    assert await streamed(readers) == whole
    assert readers.connections == 5


async def test_the_stream_of_parquet_is_json_lines(output: Path, tmp_path: Path) -> None:
    from kuberoll_workers.output.records import to_parquet

    whole = all_shards(output)
    storage = open_storage(str(output))
    for shard in storage.shards():
        to_parquet(storage, shard)
    assert (output / "shard-00000.parquet").exists()
    assert await streamed(Readers(output, tmp_path)) == whole


async def test_the_stream_stops_where_what_it_wrote_is_stored_otherwise(output: Path, tmp_path: Path) -> None:
    readers = Readers(output, tmp_path)
    readers.cut_after = [300_000]
    shard = output / "shard-00000.jsonl"
    out = io.BytesIO()

    def note(_: str) -> None:
        shard.write_bytes(b"".join(reversed(shard.read_bytes().splitlines(keepends=True))))

    with pytest.raises(ConsoleError, match=r"stored in another order.*bytes were written"):
        await Stream(out, note=note).run(readers.connect)


async def test_an_image_without_a_reader_is_named(output: Path, tmp_path: Path) -> None:
    readers = Readers(output, tmp_path)
    readers._config.unlink()
    with pytest.raises(ConsoleError, match=r"the reader cannot start in the job's worker image: .*job\.json"):
        await copy(readers, tmp_path / "here")


async def test_a_store_that_does_not_answer_is_named(
    s3: tuple[S3Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bucket = s3
    readers = Readers(f"{bucket}/run", tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ConsoleError, match="the output cannot be read: "):
        await copy(readers, tmp_path / "here")


# The decision.

contents = st.builds(Contents, st.integers(0, 5), st.sampled_from("ab"))


@given(
    size=st.integers(0, 5),
    here=st.none() | contents,
    begins=st.booleans(),
    copied=st.none() | st.builds(CopyRecord, st.integers(0, 5), st.sampled_from("ab"), st.booleans()),
    force=st.booleans(),
)
def test_what_is_here_is_replaced_only_where_that_loses_nothing(
    size: int, here: Contents | None, begins: bool, copied: CopyRecord | None, force: bool
) -> None:
    begins = begins and here is not None and here.size <= size
    action = decide(size, here, begins=begins, copied=copied, force=force)
    if here is None:
        assert action is Action.FETCH
    elif begins:
        assert action is (Action.SKIP if here.size == size else Action.CONTINUE)
    elif action is Action.FETCH:
        ours = copied is not None and copied.snapshot and (copied.size, copied.sha256) == (here.size, here.sha256)
        assert force or ours
    else:
        assert action is Action.REFUSE
        assert not force


def test_contents(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert contents_of(path) is None
    path.write_bytes(b"abc")
    assert contents_of(path) == Contents(3, hashlib.sha256(b"abc").hexdigest())
