"""Append-only files of trajectories: a record counts when its line is whole and on disk."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from kuberoll_workers.data.record import AnyRecord, encode_line


class Observes(Protocol):
    """Is told of each write: how many seconds it took, or that it failed."""

    def observe(self, amount: float) -> None: ...

    def failed(self) -> None: ...


class JournalBroken(OSError):
    """A record could not be written; nothing more is."""


class Journal(Protocol):
    """Takes records, each of which counts when it is durable."""

    async def append(self, record: AnyRecord) -> None:
        """Store one record; returns when it is durable.

        Raises:
            OSError: It could not be written.
            Unstorable: No line can hold the record; nothing else is affected.
        """
        ...

    def add(self, record: AnyRecord) -> tuple[asyncio.Future[None], int]:
        """Have one record stored soon.

        Returns:
            What is done when it is durable, for several callers the same one; and the bytes of the line.

        Raises:
            JournalBroken: An earlier record could not be written.
            Unstorable: No line can hold the record; nothing else is affected.
        """
        ...

    async def close(self) -> None:
        """Finish what is being written.

        Raises:
            JournalBroken: Something could not be written.
        """
        ...


class BatchJournal(abc.ABC):
    """Writes what has arrived meanwhile as one batch. When a write fails, every record that waits fails with it."""

    def __init__(self, where: str, *, seconds: Observes) -> None:
        """
        Args:
            where: Names the journal in errors.
            seconds: Observes the wall seconds of each write.
        """
        self._where = where
        self._seconds = seconds
        self._closing = False
        self._size = 0
        self._broken: BaseException | None = None
        self._pending: list[bytes] = []
        self._written: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None

    async def append(self, record: AnyRecord) -> None:
        """Store one record; returns when it is durable. See `Journal.append`."""
        # Shielded: others wait for the same future.
        await asyncio.shield(self.add(record)[0])

    def add(self, record: AnyRecord) -> tuple[asyncio.Future[None], int]:
        """Have one record stored soon; see `Journal.add`."""
        if self._broken is not None:
            raise self._error() from self._broken
        line = encode_line(record)
        self._pending.append(line)
        self._size += len(line)
        if self._written is None:
            self._written = asyncio.get_running_loop().create_future()
            # Its error is kept for the next record too; nobody need have waited for this one.
            self._written.add_done_callback(lambda written: written.cancelled() or written.exception())
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        return self._written, len(line)

    async def close(self) -> None:
        """Write what is left.

        Raises:
            JournalBroken: Something could not be written.
        """
        self._closing = True
        self._hurry()
        if self._writer is not None:
            await asyncio.gather(self._writer, return_exceptions=True)
        self._release()
        if self._broken is not None:
            raise self._error() from self._broken

    async def _write(self) -> None:
        written: asyncio.Future[None] | None = None
        try:
            while self._pending and self._written is not None:
                await self._gather()
                data, written = b"".join(self._pending), self._written
                self._pending, self._written, self._size = [], None, 0
                await self._store(data)
                written.set_result(None)
        except BaseException as error:
            self._broken = error
            # Those of the batch that failed, and those that came while it was being written: nothing more is.
            for waiting in (written, self._written):
                if waiting is not None and not waiting.done():
                    waiting.set_exception(self._error())
            self._pending, self._written, self._size = [], None, 0
            raise

    def _error(self) -> JournalBroken:
        return JournalBroken(f"{self._where}: {self._broken}")

    async def _gather(self) -> None:
        """Wait for more to come, where that is worth it."""
        return

    def _hurry(self) -> None:
        """Stop waiting for more."""
        return

    def _release(self) -> None:
        """Give back what the journal holds."""
        return

    @abc.abstractmethod
    async def _store(self, data: bytes) -> None:
        """Make lines durable.

        Raises:
            Exception: They could not be written.
        """


class FileJournal(BatchJournal):
    """One append-only file of lines.

    Lines that arrive while a write is being synced go to disk together with the next sync (group commit): a slow
    disk makes groups larger, not the run slower.
    """

    def __init__(self, path: Path, *, seconds: Observes, sync: bool = True) -> None:
        """Repair what is there; the file is made by the first record.

        Args:
            seconds: Observes the wall seconds of each write and sync.
            sync: Wait for the disk. Without it a record outlasts its process, but not a crash of the machine.
        """
        super().__init__(str(path), seconds=seconds)
        repair(path)
        self._path = path
        self._sync = sync
        self._file: int | None = None

    async def _store(self, data: bytes) -> None:
        started = time.perf_counter()
        try:
            await asyncio.to_thread(self._write_and_sync, data)
        except Exception:
            self._seconds.failed()
            raise
        self._seconds.observe(time.perf_counter() - started)

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_and_sync(self, data: bytes) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            if self._sync:
                sync_directory(self._path.parent)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        if self._sync:
            os.fsync(self._file)


def repair(path: Path) -> None:
    """Cut a last line that has no newline: its trajectory never counted and will be run again."""
    try:
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            whole = _end_of_last_line(file, size)
            if whole < size:
                file.truncate(whole)
                os.fsync(file.fileno())
    except FileNotFoundError:
        return


def _end_of_last_line(file: BinaryIO, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def sync_directory(path: Path) -> None:
    """Make a new file's name as durable as its contents."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def whole_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file and where they are, `file:line`; blank ones and a torn last one are passed over."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # some editors write one
            if line.endswith(b"\n") and line.strip():
                yield f"{path}:{number}", line


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file as a whole, durably: a reader, or a crash, sees the old contents or the new."""
    write_chunks_atomically(path, (data,))


def write_chunks_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """`write_atomically`, of contents that come in parts."""
    partial = partial_name(path)
    try:
        with partial.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_directory(path.parent)


def partial_name(path: Path) -> Path:
    """Where a file is made before it takes its place; nobody else's, for others may be making it too."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")


def remove_partials(directory: Path) -> None:
    """Remove what writers that were killed left of files that never took their places. No writer may be there."""
    for path in directory.glob(".*.partial"):
        if _PARTIAL.search(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")
