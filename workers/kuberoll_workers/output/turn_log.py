"""Turns of unfinished trajectories on disk, so that an interrupted trajectory resumes instead of starting over.

A shard's log is a sequence of files. A file is removed as soon as none of its turns is needed, so the log stays about
as large as the trajectories in flight, however long the run. Nothing waits for turns to be durable: a crash of the
machine only costs work that is repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kuberoll_workers.data.record import Partial, RecordError, TrajectoryKey, TurnRecord, decode_line
from kuberoll_workers.output.journal import FileJournal, WriteObserver, whole_lines

DIRECTORY = "turns"

_log = logging.getLogger(__name__)

_SEGMENT_BYTES = 64 << 20
_PENDING_BYTES = 64 << 20


@dataclass(slots=True)
class _Segment:
    path: Path
    keys: set[TrajectoryKey] = field(default_factory=set)
    size: int = 0
    written: bool = True


class TurnLog:
    """Turn log of one shard."""

    def __init__(
        self, output: Path, shard: int, *, seconds: WriteObserver, segment_bytes: int = _SEGMENT_BYTES
    ) -> None:
        """Read the existing log. Invalid lines are skipped with a warning: they can only cost work, never a result.

        Args:
            output: The run's directory.
            seconds: Told the wall seconds of each write.
        """
        self._directory = output / DIRECTORY
        self._shard = shard
        self._seconds = seconds
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []
        self._journal: FileJournal | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.partials: dict[TrajectoryKey, Partial] = {}
        for path in self._files():
            self._read(path)

    def _files(self) -> list[Path]:
        # A shard that finishes may remove the directory while it is listed; then it has no file of this shard.
        with contextlib.suppress(FileNotFoundError):
            return sorted(self._directory.glob(f"shard-{self._shard:05d}-{'[0-9]' * 6}.jsonl"))
        return []

    def _read(self, path: Path) -> None:
        segment = _Segment(path)
        for turn in _turns(path):
            segment.keys.add(turn.key)
            _take(turn, self.partials.setdefault(turn.key, Partial([])).turns)
        self._segments.append(segment)
        for key in [key for key, partial in self.partials.items() if not partial.turns]:
            del self.partials[key]

    async def append(self, turn: TurnRecord) -> None:
        """Schedule the write of one turn; waits only if too many bytes are waiting to be written.

        Raises:
            OSError: An earlier turn could not be written.
        """
        journal, segment = self._current()
        written, size = journal.add(turn)
        segment.keys.add(turn.key)
        segment.size += size
        if journal.unwritten > _PENDING_BYTES:
            await asyncio.shield(written)

    def trajectories(self) -> set[TrajectoryKey]:
        """Keys of trajectories that have turns in the log."""
        return {key for segment in self._segments for key in segment.keys}

    def ended(self, keys: Iterable[TrajectoryKey]) -> None:
        """Discard the turns of trajectories that are stored, or will not resume from them."""
        for key in keys:
            self.partials.pop(key, None)
            for segment in self._segments:
                segment.keys.discard(key)
        self._sweep()

    def _sweep(self) -> None:
        for segment in [segment for segment in self._segments if segment.written and not segment.keys]:
            with contextlib.suppress(OSError):
                segment.path.unlink()
            self._segments.remove(segment)

    async def close(self) -> None:
        """Finish pending writes, and remove files that are no longer needed."""
        self._retire()
        await asyncio.gather(*self._closing)
        self.ended(())
        with contextlib.suppress(OSError):
            # Removed with its last file; other shards may have files in it.
            self._directory.rmdir()

    def _current(self) -> tuple[FileJournal, _Segment]:
        if self._journal is not None and self._segments[-1].size < self._segment_bytes:
            return self._journal, self._segments[-1]
        self._retire()
        number = 1 + max((int(s.path.stem.rpartition("-")[2]) for s in self._segments), default=0)
        segment = _Segment(self._directory / f"shard-{self._shard:05d}-{number:06d}.jsonl", written=False)
        self._make(segment.path)
        self._segments.append(segment)
        self._journal = FileJournal(segment.path, seconds=self._seconds, sync=False)
        return self._journal, segment

    def _make(self, path: Path) -> None:
        """Create the file at once: a shard that finishes removes the directory if it is empty."""
        while True:
            self._directory.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                path.touch()
                return

    def _retire(self) -> None:
        if self._journal is not None:
            closing = asyncio.create_task(self._finish(self._journal, self._segments[-1]))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._journal = None

    async def _finish(self, journal: FileJournal, segment: _Segment) -> None:
        await journal.close()
        segment.written = True
        self._sweep()


def read_turns(directory: Path, key: TrajectoryKey) -> Partial | None:
    """The journaled turns of one trajectory of a run, which may be under way; None: there are none.

    Args:
        directory: The run's.
    """
    partial = Partial([])
    for path in sorted((directory / DIRECTORY).glob("shard-*.jsonl")):
        for turn in _turns(path):
            if turn.key == key:
                _take(turn, partial.turns)
    return partial if partial.turns else None


def _take(turn: TurnRecord, turns: list[TurnRecord]) -> None:
    if turn.turn <= len(turns) + 1:
        # The trajectory was resumed from this turn, so its earlier version is replaced.
        turns[turn.turn - 1 :] = [turn]


def _turns(path: Path) -> Iterator[TurnRecord]:
    """Valid turns in a file. Turns are written without waiting for the disk, so a crash may leave anything."""
    unusable: list[str] = []
    try:
        for where, line in whole_lines(path):
            try:
                turn = decode_line(line, TurnRecord, where=where)
                if turn.turn < 1 or min(turn.key) < 0:
                    raise RecordError(f"{where}: turn {turn.turn} of {turn.key}")
            except RecordError as error:
                unusable.append(str(error))
            else:
                yield turn
    except OSError as error:
        unusable.append(f"{path}: {error}")
    if unusable:
        _log.warning(
            "skipped %d lines that are not turns; their trajectories start over or resume from an earlier turn. "
            "The first: %s",
            len(unusable),
            unusable[0][:400],
        )
