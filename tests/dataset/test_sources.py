"""Rows out of real files, a real object store, a real HTTP server and the `datasets` library."""

from __future__ import annotations

import datetime
import errno
import functools
import gzip
import http.server
import importlib.util
import io
import json
import lzma
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.model.dataset import Dataset, HuggingFaceSource
from kuberoll_workers.dataset.reading import read_rows
from kuberoll_workers.dataset.rows import DatasetError, parse_row
from kuberoll_workers.dataset.sources import _filesystem, file_rows, hub_rows

ROWS: list[dict[str, Any]] = [{"prompt": f"p{number}", "metadata": {"n": number}} for number in range(5)]


def jsonl(rows: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def gzipped(data: bytes) -> bytes:
    # The same in each process of pytest-xdist, as parameters of a test must be.
    return gzip.compress(data, mtime=0)


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.Codec("zstd").compress(data, asbytes=True))


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    file = io.BytesIO()
    columns = dict.fromkeys(key for row in rows for key in row)
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
    pyarrow.parquet.write_table(table, file, **options)
    return file.getvalue()


def arrow(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


CONTAINERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "rows.jsonl": jsonl,
    "rows.jsonl.gz": lambda rows: gzipped(jsonl(rows)),
    "rows.jsonl.zst": lambda rows: zstd(jsonl(rows)),
    "rows.parquet": parquet,
}


def read(uri: str, base: Path = Path()) -> list[Any]:
    return [row for _, row in file_rows(uri, base)]


def refusal(rows: Callable[[], Iterator[Any]]) -> str:
    with pytest.raises(DatasetError) as caught:
        list(rows())
    return str(caught.value)


def file_refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return refusal(lambda: file_rows(path.name, path.parent))


# Rows that a Parquet schema can hold: a field has one type in all of them.
row_values = st.fixed_dictionaries(
    {"prompt": st.text()},
    optional={
        "idx": st.integers(-(2**53), 2**53),
        "metadata": st.fixed_dictionaries(
            {"truth": st.floats(allow_nan=False, allow_infinity=False)},
            optional={"level": st.integers(0, 9), "tags": st.lists(st.text(), min_size=1)},
        ),
        "stop_strings": st.lists(st.text(min_size=1), min_size=1),
        "sampling": st.fixed_dictionaries({"temperature": st.integers(0, 2) | st.floats(0, 2)}),
    },
)  # fmt: skip


@given(rows=st.lists(row_values, min_size=1))
def test_a_row_is_the_same_out_of_every_container(
    rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("rows", numbered=True)
    expected: list[Any] = []
    for name, contain in CONTAINERS.items():
        (base / name).write_bytes(contain(rows))
        checked = [parse_row(row, place=place, task_names=["a"], template=None) for place, row in file_rows(name, base)]
        found = [(r.content, r.messages, r.metadata, r.sampling, r.stop_strings, r.idx) for r in checked]
        expected = expected or found
        assert found == expected, name
    assert [row["prompt"] for row in rows] == [messages[0]["content"] for _, messages, *_ in expected]


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_a_file_is_is_said_by_its_contents(name: str, tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(CONTAINERS[name](ROWS))
    assert read("rows", tmp_path) == ROWS


@pytest.mark.parametrize("name", [name for name in CONTAINERS if "jsonl" in name])
def test_rows_know_their_lines(name: str, tmp_path: Path) -> None:
    data = b'\n{"prompt": "two"}\r\n   \n{"prompt": "four"}'
    packs: dict[str, Callable[[bytes], bytes]] = {".jsonl": bytes, ".gz": gzipped, ".zst": zstd}
    pack = packs[Path(name).suffix]
    (tmp_path / name).write_bytes(pack(data))
    assert [str(place) for place, _ in file_rows(name, tmp_path)] == [f"{tmp_path / name}:2", f"{tmp_path / name}:4"]


def test_parquet_rows_know_their_index(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(parquet(ROWS * 200, row_group_size=300))
    places = [str(place) for place, _ in file_rows("rows.parquet", tmp_path)]
    assert places == [f"{tmp_path}/rows.parquet[{number}]" for number in range(1000)]


def test_byte_order_mark_crlf_and_a_missing_last_newline_are_tolerated(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\r\n{"prompt": "x"}')
    assert read("rows.jsonl", tmp_path) == [{"prompt": "x"}] * 2


@pytest.mark.parametrize("data", [b"", b"\n \r\n", b"\xef\xbb\xbf", gzipped(b""), zstd(b""), parquet([{"a": 1}])])
def test_files_without_rows(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(data)
    assert read("rows", tmp_path) in ([], [{"a": 1}])


def test_compressed_files_that_were_joined_are_one(tmp_path: Path) -> None:
    for pack in (gzipped, zstd):
        (tmp_path / "rows").write_bytes(pack(jsonl(ROWS[:2])) + pack(jsonl(ROWS[2:])))
        assert read("rows", tmp_path) == ROWS


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{not json}", "rows:1: not a JSON object: "),
        (b'{"a": 1}\n{"a": \n1}', "rows:2: not a JSON object: "),
        (b'{"a": NaN}', "rows:1: found NaN, which JSON does not have; write null"),
        (b'\n{"a": [1, -Infinity]}', "rows:2: found -Infinity, which JSON does not have"),
        (b'{"a": "NaN"}\n{"a": "caf\xe9"}', "rows:2: not UTF-8: found the byte 0xe9 at column 11; convert the file"),
        ('{"a": 1}'.encode("utf-16"), "rows:1: not UTF-8: found the byte 0xff at column 1"),
        (b'[\n{"a": 1}\n]', "rows:1: found a JSON array; the file must be JSON lines, one row on each line: jq -c"),
        (b'\xef\xbb\xbf[{"a": 1}]', "rows:1: found a JSON array"),
        (b'{"a": "\\ud800"}', "rows:1: not a JSON object: "),
        (b"[" * 10, "rows:1: found a JSON array"),
        (b'{"a":' * 5000, "rows:1: not a JSON object: "),
        (gzipped(jsonl(ROWS))[:-9], "rows: the compressed file is incomplete or damaged"),
        (zstd(jsonl(ROWS))[:-5], "rows: the compressed file is incomplete or damaged"),
        (gzipped(jsonl(ROWS))[:-8] + bytes(8), "rows: the compressed file is incomplete or damaged"),
        (gzipped(b'{"a": 1}\nx'), "rows:2: not a JSON object"),
        (parquet(ROWS)[:-9], "rows: not a readable Parquet file"),
        (b"PAR1", "rows: not a readable Parquet file"),
        (b"BZh91AY", "rows: found a bzip2 file; it can be JSON lines (also .gz, .zst) or Parquet"),
        (b"PK\x03\x04zip", "rows: found a zip file"),
        (lzma.compress(jsonl(ROWS)), "rows: found an xz file"),
        (arrow(ROWS), "rows: found an Arrow file"),
        (b"\x89HDF\r\n\x1a\n", "rows: found an HDF5 file"),
        (parquet([{"a": b"\x00"}]), "rows[0]: a: found a bytes, which JSON cannot represent; remove the column"),
        (parquet([{"a": 1.0}, {"a": float("nan")}]), "rows[1]: a: found nan, which JSON does not have; use null"),
        (parquet([{"a": {"b": [Decimal("1.5")]}}]), "rows[0]: a.b[0]: found a Decimal"),
    ],
)  # fmt: skip
def test_unreadable_files(data: bytes, message: str, tmp_path: Path) -> None:
    assert f"{tmp_path}/{message}" in file_refusal(tmp_path / "rows", data)


def test_rows_before_a_bad_line_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(jsonl(ROWS) + b"torn")
    rows = file_rows("rows", tmp_path)
    assert [next(rows)[1] for _ in ROWS] == ROWS
    with pytest.raises(DatasetError):
        next(rows)


def test_parquet_s_nulls_and_times_are_what_json_has_for_them(tmp_path: Path) -> None:
    rows = [
        {"a": {"b": 1}, "at": datetime.datetime(2026, 1, 2, 3, 4)},
        {"a": {"c": [None]}, "day": datetime.date(2026, 1, 2)},
    ]
    (tmp_path / "rows").write_bytes(parquet(rows))
    assert read("rows", tmp_path) == [
        {"a": {"b": 1}, "at": "2026-01-02T03:04:00"},
        {"a": {"c": [None]}, "day": "2026-01-02"},
    ]


def test_a_directory_is_its_files_by_name(tmp_path: Path) -> None:
    for name, row in (("b.jsonl.gz", 2), ("a.parquet", 1), ("c.json", 3)):
        pack: Any = CONTAINERS.get(f"rows{name[1:]}", jsonl)
        (tmp_path / name).write_bytes(pack([{"n": row}]))
    for name in ("_SUCCESS", ".hidden.jsonl", "_tmp.jsonl", "README.md"):
        (tmp_path / name).write_text("no row")
    (tmp_path / "d.jsonl").mkdir()
    for uri, base in ((".", tmp_path), (str(tmp_path), Path()), (f"file://{tmp_path}/", Path("/elsewhere"))):
        assert read(uri, base) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert read("[b-d].j*", tmp_path) == read("*[b-d].j*", tmp_path) == [{"n": 2}, {"n": 3}]


def test_patterns_reach_into_directories(tmp_path: Path) -> None:
    for name, row in (("y/1.jsonl", 2), ("x/2.jsonl", 1)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(jsonl([{"n": row}]))
    assert read("*/?.jsonl", tmp_path) == [{"n": 1}, {"n": 2}]


def test_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "rows[1]::a.jsonl").write_bytes(jsonl(ROWS))
    assert read("rows[1]::a.jsonl", tmp_path) == ROWS


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("missing.jsonl", "/missing.jsonl: No such file"),
        ("*.jsonl", "/*.jsonl: no file matches"),
        (".", "the directory has no file that ends with .jsonl, .ndjson, .json, .parquet (or .gz, .zst)"),
        ("nonsense://rows.jsonl", "spec.dataset.source.uri: nonsense://rows.jsonl: Protocol not known: nonsense"),
        ("memory://missing.jsonl", "memory://missing.jsonl: No such file"),
    ],
)
def test_sources_that_are_not_there(uri: str, message: str, tmp_path: Path) -> None:
    assert message in refusal(lambda: file_rows(uri, tmp_path))


def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    message = refusal(lambda: file_rows("loop", tmp_path))
    assert message == f"spec.dataset.source.uri: {tmp_path}/loop: {os.strerror(errno.ELOOP)}"


def test_a_protocol_whose_package_is_missing_names_it(tmp_path: Path) -> None:
    packages = {"oci": "ocifs", "dropbox": "dropboxdrivefs"}
    missing = [scheme for scheme, package in packages.items() if importlib.util.find_spec(package) is None]
    if not missing:
        pytest.skip("all of them are installed")
    message = refusal(lambda: file_rows(f"{missing[0]}://bucket/rows.jsonl", tmp_path))
    assert message.startswith(f"spec.dataset.source.uri: {missing[0]}://bucket/rows.jsonl: ")
    assert f"pip install {packages[missing[0]]}" in message


# Memory


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTAINERS)
def test_memory_does_not_grow_with_the_file(name: str, tmp_path: Path) -> None:
    # Decompressed, it is the same file; there are fewer rows, and longer ones.
    count, length = (20_000, 100) if name.endswith(("gz", "zst")) else (100_000, 20)
    rows = [{"prompt": f"{number:06d}" * length, "idx": number} for number in range(count)]
    (tmp_path / name).write_bytes(
        CONTAINERS[name](rows) if name != "rows.parquet" else parquet(rows, use_dictionary=False)
    )
    size = len(jsonl(rows))
    del rows

    def peak() -> int:
        arrow = pyarrow.total_allocated_bytes()
        tracemalloc.start()
        highest = number = 0
        for number, _ in enumerate(file_rows(name, tmp_path), start=1):
            if number % 1000 == 0:
                highest = max(highest, pyarrow.total_allocated_bytes() - arrow)
        assert number == count
        try:
            return tracemalloc.get_traced_memory()[1] + highest
        finally:
            tracemalloc.stop()

    assert peak() < size / 2


def test_a_large_array_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(b"[" + b'{"prompt": "x"},' * 2_000_000)
    tracemalloc.start()
    try:
        assert "found a JSON array" in refusal(lambda: file_rows("rows.json", tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


# Elsewhere than in local files


@pytest.fixture
def memory() -> Iterator[str]:
    filesystem = fsspec.filesystem("memory")
    yield "memory://kuberoll-sources"
    filesystem.rm("/kuberoll-sources", recursive=True)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # Clients are kept by their arguments, and these are all in the environment.
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        s3fs.S3FileSystem().mkdir("kuberoll-sources")
        yield "s3://kuberoll-sources"
        # What moto stores outlives its server.
        s3fs.S3FileSystem().rm("kuberoll-sources", recursive=True)
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["memory", "bucket"])
def test_files_in_object_stores(place: str, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue(place)
    for name, contain in CONTAINERS.items():
        with fsspec.open(f"{root}/data/{name}", "wb") as file:
            file.write(contain(ROWS))
    for name in CONTAINERS:
        found = list(file_rows(f"{root}/data/{name}", Path()))
        assert [row for _, row in found] == ROWS
        assert str(found[0][0]) in (f"{root}/data/{name}:1", f"{root}/data/{name}[0]")
    assert read(f"{root}/data") == ROWS * len(CONTAINERS)
    assert read(f"{root}/data/*.gz") == ROWS
    assert "No such file" in refusal(lambda: file_rows(f"{root}/data/missing.jsonl", Path()))


@pytest.mark.slow
def test_a_bucket_that_is_not_there(bucket: str) -> None:
    assert "s3://nobody-has-this/rows.jsonl: " in refusal(lambda: file_rows("s3://nobody-has-this/rows.jsonl", Path()))


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
def test_files_over_http(served: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}" * 100} for number in range(20_000)]
    for name, contain in CONTAINERS.items():
        (tmp_path / name).write_bytes(contain(rows))
        assert read(f"{served}/{name}?signature=secret") == rows


def test_errors_over_http_do_not_tell_the_signature(served: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("torn")
    message = refusal(lambda: file_rows(f"{served}/rows.jsonl?signature=secret", Path()))
    assert message.startswith(f"{served}/rows.jsonl:1: not a JSON object")
    message = refusal(lambda: file_rows(f"{served}/missing.jsonl?signature=secret", Path()))
    assert message == f"spec.dataset.source.uri: {served}/missing.jsonl: No such file"
    assert "secret" not in message


def test_a_file_over_http_may_take_long_but_no_pause_may() -> None:
    filesystem, _ = _filesystem("http://127.0.0.1:9/rows.jsonl", "source")
    limits = filesystem.client_kwargs["timeout"]
    assert limits.total is None
    assert 0 < limits.sock_connect < 600
    assert 0 < limits.sock_read < 600


def test_a_server_that_is_not_there() -> None:
    message = refusal(lambda: file_rows("http://127.0.0.1:9/rows.jsonl?signature=secret", Path()))
    assert message.startswith("spec.dataset.source.uri: http://127.0.0.1:9/rows.jsonl: ")
    assert "secret" not in message


# The hub


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_directory_of_the_datasets_library(suffix: str, offline: None, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        (tmp_path / "mine" / f"{split}.{suffix}").write_bytes(jsonl(rows) if suffix == "jsonl" else parquet(rows))
    found = list(hub_rows(HuggingFaceSource(name="mine"), tmp_path))
    assert [row for _, row in found] == ROWS
    assert str(found[4][0]) == "mine:train[4]"
    assert [row for _, row in hub_rows(HuggingFaceSource(name="mine", split="test"), tmp_path)] == ROWS[:1]
    message = refusal(lambda: hub_rows(HuggingFaceSource(name="mine", split="dev"), tmp_path))
    assert message.startswith("spec.dataset.source.huggingface: mine: ValueError: Bad split: dev")


def test_a_hub_dataset_that_is_not_there(offline: None, tmp_path: Path) -> None:
    message = refusal(lambda: hub_rows(HuggingFaceSource(name="nobody/nothing"), tmp_path))
    assert message.startswith("spec.dataset.source.huggingface: nobody/nothing: ")


def test_without_the_datasets_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    message = refusal(lambda: hub_rows(HuggingFaceSource(name="a/b"), tmp_path))
    assert message.endswith("the package datasets is not installed here: pip install 'kuberoll[huggingface]'")


@pytest.mark.parametrize("number", [str(2**63), str(-(2**63) - 1), "123456789012345678901234", "9" * 5000])
def test_integers_that_64_bits_cannot_hold_are_refused_by_place_and_field(number: str, tmp_path: Path) -> None:
    line = f'{{"prompt": "p", "metadata": {{"hashes": [1, {number}]}}}}'
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "first"}}\n{line}\n')
    with pytest.raises(DatasetError, match=r"rows\.jsonl:2: metadata\.hashes\[1\]: found an integer.*64 bits.*as text"):
        read("rows.jsonl", tmp_path)


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 1234567890123456789])
def test_integers_of_64_bits_are_exact(number: int, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "p {10**30}", "metadata": {{"n": {number}, "x": 1e30}}}}\n')
    (row,) = read("rows.jsonl", tmp_path)
    assert row["metadata"]["n"] == number
    assert row["metadata"]["x"] == 1e30


def test_long_integers_are_refused_out_of_parquet_and_manifests(tmp_path: Path) -> None:
    column = pyarrow.array([2**64 - 1], pyarrow.uint64())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["p"], "n": column}), tmp_path / "rows.parquet")
    with pytest.raises(DatasetError, match=r"rows\.parquet\[0\]: n: found an integer"):
        read("rows.parquet", tmp_path)
    dataset = Dataset.model_validate({"source": {"rows": [{"prompt": "p", "metadata": {"n": 2**64}}]}})
    with pytest.raises(DatasetError, match=r"spec\.dataset\.source\.rows\[0\]: metadata\.n: found an integer"):
        list(read_rows(dataset, base=tmp_path, task_names=["a"], environment=None))  # type: ignore[arg-type]
