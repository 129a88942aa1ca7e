"""Files of a run for copying: each under one name, with its size at one moment.

A journal is copied as one file, `shard-00000.jsonl`, whether it is stored as one file or as a folder of parts. The run
may continue during the copy: of growing files, only the whole lines that exist now belong to the copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from kuberoll_workers.data.extras import unusable_store
from kuberoll_workers.data.record import encode_line
from kuberoll_workers.output.records import DROPPED, FAILURES
from kuberoll_workers.output.storage import StorageError, open_storage
from kuberoll_workers.output.trajectories import Trajectories

CHUNK_BYTES: Final = 256 << 10

_SUFFIXES: Final = frozenset({".json", ".jsonl", ".parquet", ".html"})
_SHARD: Final = "shard-"


class CopyBroken(Exception):
    """A file has changed since it was listed; list again."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stored file, or the beginning of one.

    Attributes:
        size: Number of bytes that belong to the copy.
    """

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file of the copy: the concatenation of its parts.

    Attributes:
        name: `shard-00000.jsonl`, `report.html`; never a path.
    """

    name: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(part.size for part in self.parts)


class Copies:
    """Files of a run, for reading.

    Args:
        location: Directory or URI of the run.

    Raises:
        StorageError: The kind of storage is unknown, or its package is not installed.
    """

    def __init__(self, location: str) -> None:
        import fsspec

        self.location = location
        try:
            # The run may continue, so listings must not be cached.
            self._fs, root = fsspec.core.url_to_fs(location.rstrip("/"), use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StorageError(f"{location}: {unusable_store(location, error)}") from error
        self._root = str(root).rstrip("/")

    def files(self) -> list[RunFile]:
        """The files as they are now, sorted by name; empty if there is no run yet.

        Links are skipped, because their targets do not belong to the run.
        """
        whole: dict[str, list[Part]] = {}
        journals: dict[str, list[Part]] = {}
        for entry in self._entries(self._root):
            name = PurePosixPath(str(entry["name"])).name
            if entry.get("islink") or name.startswith("."):
                continue
            if entry["type"] == "directory":
                if name.startswith(_SHARD) or name in {FAILURES, DROPPED}:
                    journals[f"{name}.jsonl"] = [
                        self._part(part)
                        for part in self._entries(str(entry["name"]))
                        if part["type"] == "file" and str(part["name"]).endswith(".jsonl")
                    ]
            elif PurePosixPath(name).suffix in _SUFFIXES:
                whole[name] = [self._part(entry)]
        names = sorted({*whole, *(name for name, parts in journals.items() if parts)})
        return [RunFile(name, (*whole.get(name, ()), *journals.get(name, ()))) for name in names]

    def read(self, file: RunFile, offset: int = 0) -> Iterator[bytes]:
        """The bytes of a file from an offset, in chunks of at most `CHUNK_BYTES`.

        Raises:
            CopyBroken: A part is gone or has become shorter: a journal was compacted or rewritten.
        """
        for part in file.parts:
            if offset >= part.size:
                offset -= part.size
                continue
            yield from self._bytes(part, offset)
            offset = 0

    def digest(self, file: RunFile, size: int) -> str:
        """SHA-256 of the first `size` bytes of a file, as hexadecimal digits.

        Raises:
            CopyBroken: See `read`.
        """
        found = hashlib.sha256()
        for chunk in self.read(file):
            found.update(chunk[:size])
            size -= len(chunk)
            if size <= 0:
                break
        return found.hexdigest()

    def shards(self) -> list[str]:
        """Names of the existing shards, sorted."""
        return open_storage(self.location).shards()

    def trajectories(self, shard: str) -> Iterator[bytes]:
        """Finished trajectories of a shard as JSON lines, each once, whatever their storage format.

        Unreadable lines are left out, as by all readers.

        Raises:
            RecordError: The shard's Parquet file is invalid.
        """
        for _, found in Trajectories([open_storage(self.location)], shards=[shard]).lines_by_shard():
            for line in found:
                yield encode_line(line.record) if line.line is None else line.line

    def _entries(self, folder: str) -> list[dict[str, Any]]:
        try:
            found = self._fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Some stores list the folder itself as an empty object.
        entries = [entry for entry in found if str(entry["name"]).rstrip("/") != folder]
        return sorted(entries, key=lambda entry: str(entry["name"]))

    def _part(self, entry: dict[str, Any]) -> Part:
        path, size = str(entry["name"]), int(entry["size"])
        return Part(path, self._whole_lines(path, size) if path.endswith(".jsonl") else size)

    def _whole_lines(self, path: str, size: int) -> int:
        """Number of bytes up to and including the last newline among the first `size`."""
        with self._fs.open(path, "rb") as file:
            end = size
            while end > 0:
                start = max(0, end - CHUNK_BYTES)
                file.seek(start)
                if (found := file.read(end - start).rfind(b"\n")) >= 0:
                    return int(start + found + 1)
                end = start
        return 0

    def _bytes(self, part: Part, offset: int) -> Iterator[bytes]:
        try:
            with self._fs.open(part.path, "rb") as file:
                file.seek(offset)
                left = part.size - offset
                while left > 0:
                    chunk = file.read(min(CHUNK_BYTES, left))
                    if not chunk:
                        raise CopyBroken(f"{part.path} became shorter while it was read")
                    left -= len(chunk)
                    yield bytes(chunk)
        except FileNotFoundError as error:
            raise CopyBroken(f"{part.path} was removed while it was read") from error
