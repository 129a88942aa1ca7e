"""Files and hub datasets as streams of raw rows, in constant memory."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import re
import tempfile
from collections.abc import Iterator
from datetime import date, datetime, time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import orjson

from kuberoll_api.manifest.certificates import SUFFIX
from kuberoll_api.model.dataset import HuggingFaceSource
from kuberoll_workers.data.extras import installation, unusable_store
from kuberoll_workers.dataset.rows import DatasetError, RowPosition

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

RawRow = tuple[RowPosition, Any]
"""Position and content of a row that is not validated yet; of one that cannot be read, its DatasetError."""

FIELD = "spec.dataset.source"
"""The field of a job's only source, for errors."""

_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1

_BLOCK = 8 << 20
_CHUNK = 1 << 20
_PARQUET_ROWS = 256

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_COMPRESSED = ("", ".gz", ".zst")

# The first bytes tell a file's format: names can be wrong, and signed URLs hide them.
_PARQUET = b"PAR1"
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\x50\x2a\x4d\x18": "zstd"}
_UNREADABLE = {
    b"BZh": "a bzip2",
    b"\xfd7zX": "an xz",
    b"PK\x03\x04": "a zip",
    b"ARRO": "an Arrow",
    b"\x89HDF": "an HDF5",
}

_JSON_LINES = "the file must be JSON lines, one row on each line"


def file_rows(uri: str, base: Path, field: str = FIELD) -> Iterator[RawRow]:
    """Rows of a file, of all files in a directory, or of all that match a pattern (`data/*.jsonl.gz`), sorted by name.

    JSON lines, plain or compressed with gzip or Zstandard, and Parquet, at local paths and fsspec URIs. Files at http
    URLs are copied to a temporary file first, because servers do not wait for slow readers.

    Args:
        uri: Path or URI; a relative path starts at `base`.
        field: The manifest's field, for errors.

    Raises:
        DatasetError: It cannot be read; the message names file and line.
    """
    uri = resolve_uri(uri, base)
    filesystem, path = _filesystem(uri, field)
    for file in _files(filesystem, path, uri, field):
        where = _shown(uri) if file == path else file if _is_local(uri) else str(filesystem.unstrip_protocol(file))
        with _readable(where, uri, field), contextlib.ExitStack() as opened:
            yield from _container_rows(_open(filesystem, file, uri, opened), where)


def resolve_uri(uri: str, base: Path) -> str:
    """A URI unchanged, or the path of a local file; relative paths start at `base`."""
    scheme, separator, rest = uri.partition("://")
    if separator and scheme != "file":
        return uri
    return str(resolve_path(rest if separator else uri, base))


def resolve_path(path: str, base: Path) -> Path:
    """A local path; a relative one starts at `base`."""
    found = Path(path).expanduser()
    return found if found.is_absolute() else base / found


def _is_local(uri: str) -> bool:
    return "://" not in uri


def _is_http(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _shown(uri: str) -> str:
    """A URI for messages, without the query of a URL, which is often a signature."""
    return uri.partition("?")[0] if _is_http(uri) else uri


def _filesystem(uri: str, field: str) -> tuple[AbstractFileSystem, str]:
    import fsspec

    if _is_local(uri):
        return fsspec.filesystem("file"), uri
    options: dict[str, Any] = {}
    if _is_http(uri):
        import aiohttp

        # A long file takes long, so only pauses are limited.
        options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=120)}
    with _readable(_shown(uri), uri, field):
        filesystem, path = fsspec.core.url_to_fs(uri, **options)
        # Earlier listings of this process may be outdated.
        filesystem.invalidate_cache()
        return filesystem, str(path)


def _files(filesystem: AbstractFileSystem, path: str, uri: str, field: str) -> list[str]:
    """Files that a path names, sorted by name."""
    if _is_http(uri):
        return [path]
    with _readable(uri, uri, field):
        if filesystem.isdir(path):
            names = [str(name) for name in filesystem.ls(path, detail=False)]
            files = [name for name in names if _looks_like_rows(name) and filesystem.isfile(name)]
            if not files:
                suffixes = ", ".join(_SUFFIXES)
                raise DatasetError(
                    f"{field}.uri: {uri}: the directory has no file that ends with {suffixes} (or .gz, .zst)"
                )
            return sorted(files)
        if any(letter in path for letter in "*?[") and not filesystem.exists(path):
            names = [str(name) for name in filesystem.glob(path)]
            files = sorted(
                name
                for name in names
                if not _name(name).startswith(".") and not name.endswith(SUFFIX) and filesystem.isfile(name)
            )
            if not files:
                raise DatasetError(f"{field}.uri: {uri}: no file matches")
            return files
    return [path]


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _looks_like_rows(path: str) -> bool:
    name = _name(path).lower()
    return (
        not name.startswith((".", "_"))
        and name.endswith(tuple(suffix + compressed for suffix in _SUFFIXES for compressed in _COMPRESSED))
        and not name.endswith(SUFFIX)
    )


@contextlib.contextmanager
def _readable(where: str, uri: str, field: str) -> Iterator[None]:
    """Convert errors of reading into a DatasetError that names the file."""
    try:
        yield
    except DatasetError:
        raise
    except FileNotFoundError as error:
        raise DatasetError(f"{field}.uri: {where}: {error.strerror or 'No such file'}") from error
    except ImportError as error:
        raise DatasetError(f"{field}.uri: {where}: {unusable_store(uri, error)}") from error
    except Exception as error:
        # Every store's library has its own errors: credentials, buckets, names, networks.
        reason = str(getattr(error, "strerror", None) or str(error) or repr(error)).replace(uri, where)
        raise DatasetError(f"{field}.uri: {where}: {reason}") from error


def _open(filesystem: AbstractFileSystem, path: str, uri: str, opened: contextlib.ExitStack) -> io.BufferedReader:
    if not _is_http(uri):
        file = opened.enter_context(filesystem.open(path, "rb", block_size=_BLOCK))
        return opened.enter_context(io.BufferedReader(file, _CHUNK))
    copy = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kuberoll-"))) / "copy"
    filesystem.get_file(path, str(copy))
    return opened.enter_context(io.BufferedReader(io.FileIO(copy), _CHUNK))


def _container_rows(file: io.BufferedReader, where: str) -> Iterator[RawRow]:
    head = file.peek(4)[:4]
    if head == _PARQUET:
        return _parquet_rows(file, where)
    for magic, name in _UNREADABLE.items():
        if head.startswith(magic):
            raise DatasetError(f"{where}: found {name} file; it can be JSON lines (also .gz, .zst) or Parquet")
    for magic, codec in _CODECS.items():
        if head.startswith(magic):
            return _json_rows(_decompressed(file, codec, where), where)
    return _json_rows(file, where)


class _Decompressed(io.RawIOBase):
    """Content of a compressed file, with errors that name the file."""

    def __init__(self, file: IO[bytes], codec: str, where: str) -> None:
        import pyarrow

        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), codec)
        self._where = where

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._stream.readinto(buffer))
        except OSError as error:
            if error.errno is not None:
                raise  # an error of the storage
            raise DatasetError(f"{self._where}: the compressed file is incomplete or damaged: {error}") from error


def _decompressed(file: io.BufferedReader, codec: str, where: str) -> io.BufferedReader:
    return io.BufferedReader(_Decompressed(file, codec, where), _CHUNK)


def _json_rows(lines: io.BufferedReader, where: str) -> Iterator[RawRow]:
    # Some editors write a byte-order mark, which is not part of the JSON.
    if lines.peek(3)[:3] == b"\xef\xbb\xbf":
        lines.read(3)
    # Checked before the line is read, because an array is often one very long line.
    if lines.peek(1)[:1] == b"[":
        raise DatasetError(f"{where}:1: found a JSON array; {_JSON_LINES}: jq -c '.[]' {where} > rows.jsonl")
    before = f"{where}:"
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        place = RowPosition(before, number)
        try:
            row = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            _refuse_line(text, place, error)
        # The parser converts integers beyond 64 bits to floats; most lines have no such number.
        if _LONG_NUMBER.search(text) is not None:
            row = checked_integers(json.loads(text, parse_int=_integer), place)
        yield place, row


def _integer(digits: str) -> int:
    # Python parses thousands of digits slowly; the first ones suffice to reject the number.
    return int(digits[:400])


def checked_integers(value: Any, place: RowPosition, path: str = "") -> Any:
    """The row, unchanged, after a check that all integers fit into 64 bits.

    Raises:
        DatasetError: One does not fit: records, aggregates and trainers could not represent it exactly.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            checked_integers(item, place, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            checked_integers(item, place, f"{path}[{number}]")
    elif isinstance(value, int) and not _LEAST <= value <= _MOST:
        raise DatasetError(
            f"{place}: {path.lstrip('.') or 'the row'}: found an integer that does not fit into 64 bits; write it as "
            f'text: "{str(value)[:40]}{"…" if value.bit_length() > 130 else ""}"'
        )
    return value


def _refuse_line(text: bytes, place: RowPosition, error: orjson.JSONDecodeError) -> NoReturn:
    """Raise an error that explains why a line is not JSON."""

    def constant(name: str) -> NoReturn:
        raise DatasetError(f"{place}: found {name}, which JSON does not have; write null, or remove the row") from error

    try:
        checked_integers(json.loads(text.decode("utf-8"), parse_constant=constant, parse_int=_integer), place)
    except UnicodeDecodeError as wrong:
        raise DatasetError(
            f"{place}: not UTF-8: found the byte 0x{text[wrong.start]:02x} at column {wrong.start + 1}; convert the "
            "file, for example with iconv -f latin1 -t utf-8"
        ) from error
    except (json.JSONDecodeError, RecursionError):
        pass
    raise DatasetError(f"{place}: not a JSON object: {error}; {_JSON_LINES} (jq -c . produces them)") from error


def _parquet_rows(file: io.BufferedReader, where: str) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        # Read in pages: a row group may be larger than memory.
        with pyarrow.parquet.ParquetFile(file, buffer_size=_CHUNK, pre_buffer=False) as parquet:
            before, number = f"{where}[", 0
            for batch in parquet.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    place = RowPosition(before, number, "]")
                    yield place, json_row(row, place)
                    number += 1
    except pyarrow.ArrowException as error:
        raise DatasetError(f"{where}: not a readable Parquet file: {error}") from error


def hub_rows(source: HuggingFaceSource, base: Path, field: str = FIELD) -> Iterator[RawRow]:
    """Rows of a dataset of the Hugging Face hub, or of a local directory that `datasets` can load; streamed.

    Args:
        field: The manifest's field, for errors.

    Raises:
        DatasetError: The package is missing, or the dataset cannot be read.
    """
    field = f"{field}.huggingface"
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        missing = f"the package datasets is not installed here: {installation('datasets')}"
        raise DatasetError(f"{field}: {missing}") from error
    local = resolve_path(source.name, base)
    name = str(local) if local.is_dir() else source.name
    where = f"{source.name}:{source.split}["
    try:
        datasets.disable_progress_bars()
        stream = datasets.load_dataset(
            name, source.config, split=source.split, revision=source.revision, streaming=True
        )
        for number, row in enumerate(stream):
            place = RowPosition(where, number, "]")
            yield place, json_row(row, place)
    except DatasetError:
        raise
    except Exception as error:
        # The hub's client, the loaders and the formats all have their own errors.
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise DatasetError(f"{field}: {source.name}: {type(error).__name__}: {reason}") from error


def json_row(row: Any, place: RowPosition) -> Any:
    """A row of Python values as JSON values.

    Null fields are left out, because a column has nulls for missing fields. Times become ISO 8601 strings.

    Raises:
        DatasetError: JSON cannot represent a value; the message names the row and the field.
    """
    return _json_value(row, place, "")


def _json_value(value: Any, place: RowPosition, path: str) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return checked_integers(int(value), place, path)
    if isinstance(value, dict):
        items = ((str(key), item) for key, item in value.items() if item is not None)
        return {key: _json_value(item, place, f"{path}.{key}") for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_json_value(item, place, f"{path}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DatasetError(
                f"{place}: {path.lstrip('.')}: found {value}, which JSON does not have; use null instead"
            )
        return value
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return _json_value(value.tolist(), place, path)
    raise DatasetError(
        f"{place}: {path.lstrip('.')}: found a {type(value).__name__}, which JSON cannot represent; remove the column, "
        "or write it as text"
    )
