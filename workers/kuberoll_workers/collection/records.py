"""The records of a run, read from its storage: JSON lines, Parquet, or the one and then the other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from kuberoll_workers.collection.keys import KeySet
from kuberoll_workers.collection.parquet import read_parquet, write_parquet
from kuberoll_workers.collection.storage import Storage
from kuberoll_workers.data.record import (
    DroppedRecord,
    FailureRecord,
    TrajectoryRecord,
    decode_line,
)

FAILURES = "failures"
DROPPED = "dropped"


def shard_name(shard: int) -> str:
    """Name of a shard's journal."""
    return f"shard-{shard:05d}"


def trajectories(storage: Storage, shard: str) -> Iterator[TrajectoryRecord]:
    """The records of one shard, in the order in which they were finished; streamed. A key may come twice.

    Raises:
        RecordError: A line is not a trajectory, with file and line. A torn last line is passed over.
    """
    return (record for _, record in located_trajectories(storage, shard))


def located_trajectories(storage: Storage, shard: str) -> Iterator[tuple[str, TrajectoryRecord]]:
    """`trajectories`, with where each is, for people: `file:line`, or the Parquet file."""
    with tempfile.TemporaryDirectory(prefix="kuberoll-") as directory:
        local, where = Path(directory) / "shard.parquet", storage.where(f"{shard}.parquet")
        if storage.fetch(f"{shard}.parquet", local):
            for record in read_parquet(local, where=where):
                yield where, record
    for where, line in storage.lines(shard):
        yield where, decode_line(line, TrajectoryRecord, where=where)


def failures(storage: Storage) -> Iterator[FailureRecord]:
    """All failures, oldest first.

    Raises:
        RecordError: A line is not a failure, with file and line.
    """
    for where, line in storage.lines(FAILURES):
        yield decode_line(line, FailureRecord, where=where)


def dropped(storage: Storage) -> Iterator[DroppedRecord]:
    """All trajectories that were not wanted.

    Raises:
        RecordError: A line is not a dropped trajectory, with file and line.
    """
    for where, line in storage.lines(DROPPED):
        yield decode_line(line, DroppedRecord, where=where)


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
    storage.remove_journal(shard)


def _once(records: Iterator[TrajectoryRecord]) -> Iterator[TrajectoryRecord]:
    seen = KeySet()
    for record in records:
        if record.key not in seen:
            seen.add(record.key)
            yield record
