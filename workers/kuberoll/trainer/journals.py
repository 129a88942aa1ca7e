"""Lines of a run's journals, read as they are written; docs/reference/run-files.md has the files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

from kuberoll.trainer.groups import NO_LINE, NOWHERE, Position
from kuberoll_workers.data.extras import unusable_store
from kuberoll_workers.data.record import RecordError, TrajectoryKey, TrajectoryRecord
from kuberoll_workers.output.manifest import AGGREGATES
from kuberoll_workers.output.parquet import read_rows
from kuberoll_workers.output.records import DROPPED, FAILURES
from kuberoll_workers.output.storage import StorageError, modification_time
from kuberoll_workers.output.unreadable import warn_unreadable

LOCAL_SECONDS: Final = 0.02
"""Seconds between two looks at a directory; with nothing new they grow to `LOCAL_IDLE_SECONDS`."""
LOCAL_IDLE_SECONDS: Final = 0.05
REMOTE_SECONDS: Final = 1.0
"""Seconds between two listings of an object store."""

_JOURNAL = re.compile(r"(?P<journal>shard-\d+|failures|dropped)(?:/(?P<part>[^/]+))?\.jsonl")
_PARQUET = re.compile(r"(?P<journal>shard-\d+)\.parquet")
_PART = re.compile(r"(.*-)(\d+)")
_DIGESTED_BYTES = 4096
"""Bytes of a line by which it is recognized: its key is among the first."""


class Entry(NamedTuple):
    """A file of a run at one moment.

    Attributes:
        name: Within the run: `shard-00000.jsonl`, `dropped/worker-….jsonl`.
        modified: Time of its last change, comparable among the entries of a listing; None: the store does not say.
    """

    name: str
    size: int
    modified: float | None


class Place(Protocol):
    """Where a run's files are.

    Attributes:
        seconds, idle_seconds: Seconds between two listings while there is something new, and at most.
        immutable_parts: True if files in folders are complete when they appear.
    """

    seconds: float
    idle_seconds: float
    immutable_parts: bool

    def entries(self) -> list[Entry]:
        """Journals, Parquet files and the aggregates, in no order."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading.

        Raises:
            FileNotFoundError: It is gone.
        """
        ...

    def where(self, name: str) -> str:
        """Location of a file, for messages."""
        ...


def open_place(location: str, *, seconds: float | None = None) -> Place:
    """The place at a path or URI.

    Args:
        seconds: Seconds between two listings; None: as the kind of storage suggests.

    Raises:
        StorageError: The kind of storage is unknown, or its package is not installed.
    """
    scheme, separator, rest = location.partition("://")
    if not separator:
        return _Directory(Path(location).expanduser(), seconds)
    return _Directory(Path(rest), seconds) if scheme == "file" else _ObjectStore(location, seconds)


class _Directory:
    immutable_parts = False

    def __init__(self, path: Path, seconds: float | None) -> None:
        self._path = path
        self.seconds = LOCAL_SECONDS if seconds is None else seconds
        self.idle_seconds = LOCAL_IDLE_SECONDS if seconds is None else seconds

    def entries(self) -> list[Entry]:
        return self._listed("", follow=True)

    def _listed(self, folder: str, *, follow: bool) -> list[Entry]:
        found: list[Entry] = []
        with os.scandir(self._path / folder) as items:
            for item in items:
                name = f"{folder}/{item.name}" if folder else item.name
                # The end of a run compacts folders, and removes them.
                with contextlib.suppress(FileNotFoundError):
                    if follow and name in (FAILURES, DROPPED):
                        found += self._listed(name, follow=False)
                    elif _is_read(name):
                        stat = item.stat()
                        found.append(Entry(name, stat.st_size, stat.st_mtime))
        return found

    def open(self, name: str) -> BinaryIO:
        return (self._path / name).open("rb")

    def where(self, name: str) -> str:
        return str(self._path / name)


class _ObjectStore:
    immutable_parts = True

    def __init__(self, uri: str, seconds: float | None) -> None:
        self._uri = uri.rstrip("/")
        self.seconds = self.idle_seconds = REMOTE_SECONDS if seconds is None else seconds
        try:
            from fsspec.core import url_to_fs

            # Others write to the store, so listings must not be cached.
            self._fs, root = url_to_fs(self._uri, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StorageError(f"{uri}: {unusable_store(uri, error)}") from error
        self._root = str(root).rstrip("/")

    def entries(self) -> list[Entry]:
        found: dict[str, dict[str, Any]] = self._fs.find(self._root, detail=True)
        named = ((path.removeprefix(self._root).lstrip("/"), entry) for path, entry in found.items())
        return [Entry(name, int(entry["size"]), modification_time(entry)) for name, entry in named if _is_read(name)]

    def open(self, name: str) -> BinaryIO:
        opened: BinaryIO = self._fs.open(f"{self._root}/{name}", "rb")
        return opened

    def where(self, name: str) -> str:
        return f"{self._uri}/{name}"


def _is_read(name: str) -> bool:
    return name == AGGREGATES or bool(_JOURNAL.fullmatch(name) or _PARQUET.fullmatch(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a journal, or a row of Parquet.

    Attributes:
        journal: `shard-00000`, `failures`, `dropped`.
        text: The line; None for a row of Parquet, which is `record`.
    """

    journal: str
    where: str
    position: Position
    text: bytes | None
    record: TrajectoryRecord | None = None


Hints = dict[str, Any]
"""Places before which every line is settled, as JSON: `files`, `[offset, length, digest]` of each, the last two of the
line before; `parts`, the number of the first part that is not settled, by the beginning that names of parts share."""


class JournalReader:
    """Reader of all journals, which reads every line once. After a change of format some may come again."""

    def __init__(
        self, place: Place, *, is_settled: Callable[[TrajectoryKey], bool], hints: Hints | None = None
    ) -> None:
        """Begin at the start, or at earlier places.

        Args:
            is_settled: A predicate for rows of Parquet: True if they need not be read.
            hints: As `hints` made them. Those that do not fit the files are ignored, and lines read again.
        """
        self._place = place
        self._is_settled = is_settled
        self._hints: Hints = hints or {"files": {}, "parts": {}}
        self._read: dict[str, int] = {}
        self._last: dict[str, tuple[int, str]] = {}
        # Files whose reader has stopped in the middle of what was there.
        self._begun: set[str] = set()
        self._parquet: dict[str, tuple[int, float | None]] = {}
        # Bytes read of files that are gone, by journal.
        self._gone: dict[str, int] = {}
        self._ended = False
        self._passed = False

    @property
    def ended(self) -> bool:
        """True if the aggregates, which a run writes last, were newer than all journals in the last pass."""
        return self._ended

    def lines(self) -> Iterator[Line]:
        """One pass: what is there now and was not read before: dropped trajectories, the shards in order, failures.

        The order of what is there at one moment depends on the files only.

        Raises:
            RecordError: A shard's Parquet file is invalid.
        """
        entries = {entry.name: entry for entry in self._place.entries()}
        self._forget_all_but(entries)
        for journal, files in _by_journal(entries).items():
            self._skip_compacted(journal, files)
            for entry in files:
                is_parquet = _PARQUET.fullmatch(entry.name)
                yield from self._parquet_rows(journal, entry) if is_parquet else self._new_lines(entry)
        self._ended = _is_last(entries)
        self._hints = {"files": {}, "parts": {}}
        self._passed = True

    def follows(self, name: str) -> bool:
        """True if a part of an object store may be read before it is listed: all that was written before it was read.

        Args:
            name: Of a part that is complete.
        """
        found = self._part(name)
        if found is None or not self._passed or not _is_read(name):
            return False
        prefix, number = found
        digits = len(name.removesuffix(".jsonl")) - len(prefix)
        # Writers number their parts from 1; places of later readers rely on there being no gap.
        return number == 1 or f"{prefix}{number - 1:0{digits}d}.jsonl" in self._read

    def has_read(self, name: str) -> bool:
        """True if a pass, or `lines_of`, has read a part."""
        return name in self._read

    def lines_of(self, name: str, contents: bytes) -> Iterator[Line]:
        """The lines of a part that `follows` and that no pass has read, as a pass would read them."""
        self._ended = False
        self._read[name] = 0
        yield from self._lines_from(name, 0, len(contents), BytesIO(contents))

    def hints(self, needed: Iterator[Position]) -> Hints:
        """Places from which a later reader finds all lines that it needs.

        Args:
            needed: Positions of lines that were read and are needed again.
        """
        low = {
            name: (end, self._last.get(name, NO_LINE))
            for name, end in self._read.items()
            # A failure is needed for as long as its group is not complete.
            if _journal_of(name) != FAILURES
        }
        moved: set[str] = set()
        for file, offset, before in needed:
            if file in low:
                if offset < low[file][0]:
                    low[file] = offset, before
            elif file:
                # It was compacted: the line is somewhere in another file of the journal.
                moved.add(_journal_of(file))
        # What the present pass has not come to is as the earlier reader left it.
        files: dict[str, list[Any]] = {name: hint for name, hint in self._hints["files"].items() if name not in low}
        parts: dict[str, int] = {}
        for name in sorted(low):
            offset, before = low[name]
            if (part := self._part(name)) is None:
                files[name] = [offset, *before]
            elif (
                parts.setdefault(part[0], part[1]) == part[1] and offset == self._read[name] and name not in self._begun
            ):
                # Parts are numbered: up to the first one that has something left, none needs to be named.
                parts[part[0]] = part[1] + 1
        for prefix, number in self._hints["parts"].items():
            parts[prefix] = max(number, parts.get(prefix, 0))
        return {
            "files": {name: hint for name, hint in files.items() if _journal_of(name) not in moved},
            "parts": {prefix: number for prefix, number in parts.items() if _journal_of(prefix) not in moved},
        }

    def _forget_all_but(self, entries: Mapping[str, Entry]) -> None:
        for name in self._read.keys() - entries.keys():
            journal = _journal_of(name)
            self._gone[journal] = self._gone.get(journal, 0) + self._read.pop(name)
            self._last.pop(name, None)
            self._begun.discard(name)

    def _part(self, name: str) -> tuple[str, int] | None:
        if not self._place.immutable_parts or "/" not in name:
            return None
        found = _PART.fullmatch(name.removesuffix(".jsonl"))
        return None if found is None else (found[1], int(found[2]))

    def _skip_compacted(self, journal: str, files: Sequence[Entry]) -> None:
        """Do not read what was read as parts again, when it has become one file."""
        sizes = {entry.name: entry.size for entry in files}
        whole = f"{journal}.jsonl"
        if not self._place.immutable_parts or whole not in sizes:
            return
        # Bytes of one merge: those of an earlier one are in the one file already.
        gone = self._gone.pop(journal, 0)
        if self._read.get(whole) == sizes[whole]:
            return
        read = {name: self._read.get(name, 0) for name in sizes}
        if any(read[name] < size for name, size in sizes.items() if "/" in name):
            return
        if gone + sum(read.values()) == sizes[whole]:
            self._read[whole] = sizes[whole]
            self._last.pop(whole, None)

    def _new_lines(self, entry: Entry) -> Iterator[Line]:
        name, size = entry.name, entry.size
        start = self._read.get(name)
        if start is None and (part := self._part(name)) is not None:
            start = self._read[name] = size if part[1] < self._hints["parts"].get(part[0], 0) else 0
        if start == size:
            return
        try:
            with self._place.open(name) as file:
                if start is None:
                    start = self._beginning(name, size, file)
                elif start > size:
                    start = 0  # it lost its end in a crash of the machine, or was replaced
                file.seek(start)
                yield from self._lines_from(name, start, size, file)
        except FileNotFoundError:
            return  # it was compacted or converted since it was listed: the next pass finds the other file

    def _lines_from(self, name: str, start: int, size: int, file: BinaryIO) -> Iterator[Line]:
        journal, last = _journal_of(name), self._last.get(name, NO_LINE) if start else NO_LINE
        self._begun.add(name)
        while start < size and (line := file.readline()).endswith(b"\n"):
            position = Position(name, start, last)
            start, last = start + len(line), (len(line), _digest(line))
            # Before the line is used: whoever stops here has had it.
            self._read[name], self._last[name] = start, last
            text = line.removeprefix(b"\xef\xbb\xbf") if position.offset == 0 else line
            if text.strip():
                where = f"{self._place.where(name)} at byte {position.offset}"
                yield Line(journal=journal, where=where, position=position, text=text)
        self._begun.discard(name)

    def _beginning(self, name: str, size: int, file: BinaryIO) -> int:
        offset, length, digest = self._hints["files"].get(name, (0, *NO_LINE))
        if not 0 < length <= offset <= size:
            return 0
        file.seek(offset - length)
        if _digest(file.read(length)) != digest:
            return 0
        self._read[name], self._last[name] = offset, (length, digest)
        return int(offset)

    def _parquet_rows(self, journal: str, entry: Entry) -> Iterator[Line]:
        signature = entry.size, entry.modified
        if self._parquet.get(entry.name) == signature:
            return
        where = self._place.where(entry.name)
        try:
            with self._place.open(entry.name) as file:
                for record in read_rows(
                    file, where=where, wanted=lambda key: not self._is_settled(key), unreadable=_unreadable
                ):
                    yield Line(journal=journal, where=where, position=NOWHERE, text=None, record=record)
        except FileNotFoundError:
            return
        self._parquet[entry.name] = signature


def _journal_of(name: str) -> str:
    return name.partition("/")[0].removesuffix(".jsonl")


def _by_journal(entries: Mapping[str, Entry]) -> dict[str, list[Entry]]:
    """Files of each journal in order: Parquet, the one file, its parts.

    Dropped trajectories are first: a finished one that was too old is not delivered.
    """
    found: dict[str, list[Entry]] = {}
    for name in sorted(entries, key=lambda name: (not name.endswith(".parquet"), "/" in name, name)):
        if (match := _JOURNAL.fullmatch(name) or _PARQUET.fullmatch(name)) is not None:
            found.setdefault(match["journal"], []).append(entries[name])
    order = {DROPPED: -1, FAILURES: 1}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0], 0), item[0])))


def _is_last(entries: Mapping[str, Entry]) -> bool:
    if (aggregates := entries.get(AGGREGATES)) is None or aggregates.modified is None:
        return False
    times = [entry.modified for entry in entries.values()]
    return all(time is not None and time <= aggregates.modified for time in times)


def _digest(line: bytes) -> str:
    return hashlib.blake2b(line[:_DIGESTED_BYTES], digest_size=8).hexdigest()


def _unreadable(error: RecordError) -> None:
    warn_unreadable(error, trajectory=True)
