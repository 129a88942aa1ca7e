"""The records of a run, read from its storage: JSON lines, Parquet, or the one and then the other."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kuberoll_workers.collection.keys import KeySet
from kuberoll_workers.collection.parquet import read_parquet, write_parquet
from kuberoll_workers.collection.storage import Storage
from kuberoll_workers.collection.unreadable import file_of, set_aside
from kuberoll_workers.data.record import (
    DroppedRecord,
    FailureRecord,
    RecordError,
    TrajectoryRecord,
    decode_line,
)

FAILURES = "failures"
DROPPED = "dropped"

_Record = TypeVar("_Record", TrajectoryRecord, FailureRecord, DroppedRecord)


def shard_name(shard: int) -> str:
    """Name of a shard's journal."""
    return f"shard-{shard:05d}"


def trajectories(storage: Storage, shard: str) -> Iterator[TrajectoryRecord]:
    """The records of one shard, in the order in which they were finished; streamed. A key may come twice.

    A line that cannot be read is left out with a warning, a torn last line without one.

    Raises:
        RecordError: The shard's Parquet file is none.
    """
    return (record for _, record in located_trajectories(storage, shard))


def located_trajectories(storage: Storage, shard: str) -> Iterator[tuple[str, TrajectoryRecord]]:
    """`trajectories`, with where each is, for people: `file:line`, or the Parquet file."""
    with tempfile.TemporaryDirectory(prefix="kuberoll-") as directory:
        local, where = Path(directory) / "shard.parquet", storage.where(f"{shard}.parquet")
        if storage.fetch(f"{shard}.parquet", local):
            for record in read_parquet(local, where=where, unreadable=_lost):
                yield where, record
    yield from _readable(storage, shard, TrajectoryRecord, _lost)


def failures(storage: Storage) -> Iterator[FailureRecord]:
    """All failures, oldest first; a line that cannot be read is left out with a warning."""
    return (record for _, record in _readable(storage, FAILURES, FailureRecord, _left_out))


def dropped(storage: Storage) -> Iterator[DroppedRecord]:
    """All trajectories that were not wanted; a line that cannot be read is left out with a warning."""
    return (record for _, record in _readable(storage, DROPPED, DroppedRecord, _left_out))


_lost = functools.partial(set_aside, trajectory=True)
_left_out = functools.partial(set_aside, trajectory=False)


def _readable(
    storage: Storage, name: str, kind: type[_Record], unreadable: Callable[[RecordError], None]
) -> Iterator[tuple[str, _Record]]:
    for where, line in storage.lines(name):
        try:
            record = decode_line(line, kind, where=where)
        except RecordError as error:
            unreadable(error)
            continue
        yield where, record


def to_parquet(storage: Storage, shard: str) -> None:
    """Turn a shard's journal into its Parquet file, together with what that file holds already.

    A crash on the way leaves the journal, or both, and no record is lost: readers take each key once.
    """
    first = next(iter(storage.lines(shard)), None)
    if first is None:
        return
    with tempfile.TemporaryDirectory(prefix="kuberoll-") as directory:
        made = Path(directory) / f"{shard}.parquet"
        write_parquet(made, _once(trajectories(storage, shard)))
        storage.upload(made.name, made)
    _keep_unreadable(storage, shard)
    storage.remove_journal(shard)


def _keep_unreadable(storage: Storage, shard: str) -> None:
    """Copy the journal's lines that went into no Parquet file: whatever they are, nothing is thrown away."""
    kept = (storage.read(file_of(shard)) or b"").splitlines(keepends=True)
    for where, line in storage.lines(shard):
        try:
            decode_line(line, TrajectoryRecord, where=where)
        except RecordError:
            # After a crash on the way they were copied already.
            if line not in kept:
                kept.append(line)
    if kept:
        storage.write(file_of(shard), b"".join(kept))


def _once(records: Iterator[TrajectoryRecord]) -> Iterator[TrajectoryRecord]:
    seen = KeySet()
    for record in records:
        if record.key not in seen:
            seen.add(record.key)
            yield record
