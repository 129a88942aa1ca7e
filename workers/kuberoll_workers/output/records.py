"""Records of a run, read from its storage: JSON lines, Parquet, or both."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from kuberoll_workers.data.record import (
    DroppedRecord,
    FailureRecord,
    RecordError,
    TrajectoryKey,
    TrajectoryRecord,
    decode_line,
    key_of,
)
from kuberoll_workers.data.stop_reasons import OVERRULING
from kuberoll_workers.output.parquet import read_keys, read_parquet, write_parquet
from kuberoll_workers.output.precedence import Precedence
from kuberoll_workers.output.storage import Storage
from kuberoll_workers.output.unreadable import file_of, warn_unreadable

FAILURES = "failures"
DROPPED = "dropped"

_Record = TypeVar("_Record", TrajectoryRecord, FailureRecord, DroppedRecord)


def shard_name(shard: int) -> str:
    """Name of a shard's journal."""
    return f"shard-{shard:05d}"


def trajectories(storage: Storage, shard: str) -> Iterator[TrajectoryRecord]:
    """Records of one shard in the order in which they finished; streamed. A key may occur twice.

    An unreadable line is left out with a warning, an incomplete last line without one.

    Raises:
        RecordError: The shard's Parquet file is invalid.
    """
    return (line.record for line in shard_lines(storage, shard))


class ShardLine(NamedTuple):
    """A record of a shard, with its position.

    Attributes:
        where: Position for messages: `file:line`, or the Parquet file.
        line: The line that it was read from; None for a row of Parquet.
    """

    where: str
    record: TrajectoryRecord
    line: bytes | None = None


def shard_lines(storage: Storage, shard: str) -> Iterator[ShardLine]:
    """`trajectories` with the position and the line of each record."""
    made = storage.stamp(f"{shard}.parquet")
    yield from _rows(storage, shard)
    for where, line in storage.lines(shard):
        if (found := _decoded(line, TrajectoryRecord, where, _lost)) is not None:
            yield ShardLine(where, found, line)
    if storage.stamp(f"{shard}.parquet") != made:
        # The journal was converted meanwhile, perhaps before it was read here.
        yield from _rows(storage, shard)


def _rows(storage: Storage, shard: str) -> Iterator[ShardLine]:
    where = storage.where(f"{shard}.parquet")
    with _fetched(storage, shard) as local:
        if local is not None:
            for record in read_parquet(local, where=where, unreadable=_lost):
                yield ShardLine(where, record)


def keys(storage: Storage, journal: str) -> Iterator[TrajectoryKey]:
    """Keys of a shard, the failures or the dropped trajectories, at a twentieth of the cost of reading the records.

    Some may belong to unreadable lines.

    Raises:
        RecordError: The shard's Parquet file is invalid.
    """
    made = storage.stamp(f"{journal}.parquet")
    yield from _keys_of_rows(storage, journal)
    for _, line in storage.lines(journal):
        if (key := key_of(line)) is not None:
            yield key
    if storage.stamp(f"{journal}.parquet") != made:
        yield from _keys_of_rows(storage, journal)


def _keys_of_rows(storage: Storage, journal: str) -> Iterator[TrajectoryKey]:
    with _fetched(storage, journal) as local:
        if local is not None:
            yield from read_keys(local, where=storage.where(f"{journal}.parquet"))


@contextmanager
def _fetched(storage: Storage, shard: str) -> Iterator[Path | None]:
    """Local copy of the shard's Parquet file, until the block is left; None if there is no such file."""
    with tempfile.TemporaryDirectory(prefix="kuberoll-") as directory:
        local = Path(directory) / "shard.parquet"
        yield local if storage.fetch(f"{shard}.parquet", local) else None


def failures(storage: Storage) -> Iterator[FailureRecord]:
    """All failures, oldest first; an unreadable line is left out with a warning."""
    return _readable(storage, FAILURES, FailureRecord)


def dropped(storage: Storage) -> Iterator[DroppedRecord]:
    """All dropped trajectories; an unreadable line is left out with a warning."""
    return _readable(storage, DROPPED, DroppedRecord)


def overruled(storage: Storage) -> Iterator[TrajectoryKey]:
    """Keys of trajectories that do not count as finished, whatever lines the shards have of them."""
    for where, line in storage.lines(DROPPED):
        # The rest of a line, which may be long, is not decoded for most of them.
        if _reason(line) in OVERRULING and (found := _decoded(line, DroppedRecord, where, _left_out)) is not None:
            yield found.key


class _Dropped(msgspec.Struct):
    reason: str = ""


_REASON = msgspec.json.Decoder(_Dropped)


def _reason(line: bytes) -> str:
    try:
        return _REASON.decode(line).reason
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


_lost = functools.partial(warn_unreadable, trajectory=True)
_left_out = functools.partial(warn_unreadable, trajectory=False)


def _readable(storage: Storage, name: str, kind: type[_Record]) -> Iterator[_Record]:
    found = (_decoded(line, kind, where, _left_out) for where, line in storage.lines(name))
    return (record for record in found if record is not None)


def _decoded(line: bytes, kind: type[_Record], where: str, unreadable: Callable[[RecordError], None]) -> _Record | None:
    try:
        return decode_line(line, kind, where=where)
    except RecordError as error:
        unreadable(error)
        return None


def to_parquet(storage: Storage, shard: str) -> None:
    """Convert a shard's journal into its Parquet file, together with the existing content of that file.

    Of several lines of a trajectory in the shard one is kept: that which counts unless a line of another journal does.
    After a crash the journal, or both files, exist, and no trajectory is lost: readers return each once.
    """
    # Only these are removed at the end: another worker that goes on with the shard may add others.
    files = storage.journal_files(shard)
    if next(iter(storage.lines(shard)), None) is None:
        return
    with tempfile.TemporaryDirectory(prefix="kuberoll-") as directory:
        made = Path(directory) / f"{shard}.parquet"
        counts = Precedence(keys(storage, shard), lambda: trajectories(storage, shard)).selector()
        write_parquet(made, filter(counts, trajectories(storage, shard)))
        storage.upload(made.name, made)
    _keep_unreadable(storage, shard)
    storage.remove_files(files)


def _keep_unreadable(storage: Storage, shard: str) -> None:
    """Copy the journal's unreadable lines, which do not fit into Parquet: nothing is thrown away."""
    kept = (storage.read(file_of(shard)) or b"").splitlines(keepends=True)
    for where, line in storage.lines(shard):
        try:
            decode_line(line, TrajectoryRecord, where=where)
        except RecordError:
            # After a crash they may have been copied already.
            if line not in kept:
                kept.append(line)
    if kept:
        storage.write(file_of(shard), b"".join(kept))
