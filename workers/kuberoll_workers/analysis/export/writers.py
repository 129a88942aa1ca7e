"""Writers of row files, which are complete or do not exist."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy
import orjson

from kuberoll_workers.analysis.export.columns import storage_type, with_json
from kuberoll_workers.analysis.export.formats import Container, ExportError
from kuberoll_workers.output.journal import sync_directory

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]

_ROWS = 256
_NUMBERS = 1 << 20
"""Maximum numbers of rows, and of values, in a Parquet row group, which is held in memory."""


def write_rows(
    path: Path, rows: Iterable[Row], *, container: Container, schema: pyarrow.Schema | None = None, force: bool = False
) -> bool:
    """Write a file of rows, streamed; it gets its name when it is complete and on disk.

    Args:
        schema: Columns of a Parquet file.
        force: Overwrite an existing file.

    Returns:
        True if there was a row; otherwise no file is created.

    Raises:
        ExportError: The file exists already, or cannot be written.
    """
    iterator = iter(rows)
    first = next(iterator, None)
    if first is None:
        _refuse_existing(path, force)
        return False
    with new_files((path,), force=force) as made:
        everything = chain([first], iterator)
        if container == "parquet":
            _write_parquet(made[path], everything, schema)
        else:
            made[path].writelines(map(json_line, everything))
    return True


def write_document(path: Path, rows: Iterable[Row], document: Callable[[Iterable[Row]], Row], *, force: bool) -> bool:
    """Write a file of PyTorch, whose content is held in memory.

    Args:
        document: Makes the content from the rows.
        force: Overwrite an existing file.

    Returns:
        True if there was a row; otherwise no file is created.

    Raises:
        ExportError: The file exists already or cannot be written, or PyTorch is missing.
    """
    _refuse_existing(path, force)
    if importlib.util.find_spec("torch") is None:
        raise ExportError(f"{path}: a .pt file is written by PyTorch, which is not installed: pip install torch")
    import torch

    kept = list(rows)
    if not kept:
        return False
    with new_files((path,), force=force) as made:
        torch.save(document(kept), made[path])
    return True


@contextlib.contextmanager
def new_files(paths: Sequence[Path], *, force: bool = False) -> Iterator[Mapping[Path, BinaryIO]]:
    """Files to write, by path; they get their names at the end of the block, when all are complete and on disk.

    Args:
        paths: Their paths, in the order in which they get their names.
        force: Overwrite existing files.

    Raises:
        ExportError: A file exists already, or cannot be written.
    """
    for path in paths:
        _refuse_existing(path, force)
    partials = {path: path.with_name(f".{path.name}.{os.getpid()}.partial") for path in paths}
    where = paths[-1]
    try:
        with contextlib.ExitStack() as stack:
            made = {}
            for path, partial in partials.items():
                where = path
                path.parent.mkdir(parents=True, exist_ok=True)
                made[path] = stack.enter_context(partial.open("xb"))
            yield made
            for file in made.values():
                file.flush()
                os.fsync(file.fileno())
        for path in paths:
            _refuse_existing(path, force)
        for path, partial in partials.items():
            where = path
            partial.replace(path)
            sync_directory(path.parent)
    except OSError as error:
        raise ExportError(f"{where}: {error.strerror or error}") from error
    finally:
        for partial in partials.values():
            # Where it could not be created, it cannot be removed either.
            with contextlib.suppress(OSError):
                partial.unlink()


def _refuse_existing(path: Path, force: bool) -> None:
    if not force and path.exists():
        raise ExportError(f"{path} exists already: choose another --output, or overwrite it with --force")


def json_line(row: Row) -> bytes:
    """A row as a line of JSON."""
    return orjson.dumps(row, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _plain(value: object) -> object:
    if isinstance(value, array):
        return numpy.asarray(value)
    raise TypeError(f"{type(value).__name__} cannot be exported")


def _write_parquet(file: BinaryIO, rows: Iterator[Row], schema: pyarrow.Schema | None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert schema is not None
    stored = pa.schema([(field.name, storage_type(field.type)) for field in schema])
    as_json = [field for field in schema if storage_type(field.type) != field.type]
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in _row_groups(rows):
            for row in batch:
                row.update({field.name: with_json(row.get(field.name), field.type) for field in as_json})
            table = pa.Table.from_pylist(batch, schema=stored)
            writer.write_table(table.cast(schema) if as_json else table, row_group_size=len(batch))


def _row_groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    numbers = 0
    for row in rows:
        group.append(row)
        numbers += sum(len(value) for value in row.values() if isinstance(value, list | array))
        if len(group) == _ROWS or numbers >= _NUMBERS:
            yield group
            group, numbers = [], 0
    if group:
        yield group
