"""Append-only files of trajectories: a record counts when its line is complete and on disk."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import errno
import fcntl
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from kuberoll_workers.data.record import AnyRecord, encode_line


class WriteObserver(Protocol):
    """Receives the duration of each write in seconds, or its failure."""

    def observe(self, amount: float) -> None: ...

    def failed(self) -> None: ...


class JournalBroken(OSError):
    """A record could not be written; the journal writes nothing more."""


class Journal(Protocol):
    """Stores records, each of which counts when it is durable."""

    async def append(self, record: AnyRecord) -> None:
        """Store one record; returns when it is durable.

        Raises:
            OSError: It could not be written.
            Unstorable: The record cannot be encoded as a line; nothing else is affected.
        """
        ...

    def add(self, record: AnyRecord) -> tuple[asyncio.Future[None], int]:
        """Schedule the storage of one record.

        Returns:
            A future that completes when it is durable, possibly shared with other records, and the line's size in
            bytes.

        Raises:
            JournalBroken: An earlier record could not be written.
            Unstorable: The record cannot be encoded as a line; nothing else is affected.
        """
        ...

    def hurry(self) -> None:
        """Write the records that wait for others now."""
        ...

    async def close(self) -> None:
        """Finish pending writes.

        Raises:
            JournalBroken: A record could not be written.
        """
        ...


class BatchJournal(abc.ABC):
    """Writes the records that arrived in the meantime as one batch. A failed write fails all waiting records.

    Attributes:
        unwritten: Bytes of the lines that are not durable yet.
    """

    def __init__(self, where: str, *, seconds: WriteObserver) -> None:
        """
        Args:
            where: Name of the journal for errors.
            seconds: Told the wall seconds of each write.
        """
        self._where = where
        self._seconds = seconds
        self._closing = False
        self._size = 0
        self.unwritten = 0
        self._broken: BaseException | None = None
        self._pending: list[bytes] = []
        self._written: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None

    async def append(self, record: AnyRecord) -> None:
        """Store one record; returns when it is durable. See `Journal.append`."""
        # Shielded: others wait for the same future.
        await asyncio.shield(self.add(record)[0])

    def add(self, record: AnyRecord) -> tuple[asyncio.Future[None], int]:
        """Schedule the storage of one record; see `Journal.add`."""
        if self._broken is not None:
            raise self._error() from self._broken
        line = encode_line(record)
        self._pending.append(line)
        self._size += len(line)
        self.unwritten += len(line)
        if self._written is None:
            self._written = asyncio.get_running_loop().create_future()
            # The error is also kept for the next record; possibly nobody waits for this future.
            self._written.add_done_callback(lambda written: written.cancelled() or written.exception())
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        return self._written, len(line)

    def hurry(self) -> None:
        """Write the records that wait for others now; see `Journal.hurry`."""
        return

    async def close(self) -> None:
        """Write the remaining records.

        Raises:
            JournalBroken: A record could not be written.
        """
        self._closing = True
        self.hurry()
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
                self.unwritten -= len(data)
                written.set_result(None)
        except BaseException as error:
            self._broken = error
            # Fail the records of the failed batch, and those that arrived during the write: nothing more is written.
            for waiting in (written, self._written):
                if waiting is not None and not waiting.done():
                    waiting.set_exception(self._error())
            self._pending, self._written, self._size, self.unwritten = [], None, 0, 0
            raise

    def _error(self) -> JournalBroken:
        return JournalBroken(f"{self._where}: {self._broken}")

    async def _gather(self) -> None:
        """Wait for more records, if that is worth it."""
        return

    def _release(self) -> None:
        """Release the journal's resources."""
        return

    @abc.abstractmethod
    async def _store(self, data: bytes) -> None:
        """Make lines durable.

        Raises:
            Exception: They could not be written.
        """


class FileJournal(BatchJournal):
    """One append-only file of lines.

    Lines that arrive during a sync go to disk together with the next one (group commit): a slow disk makes batches
    larger, not the run slower.
    """

    def __init__(self, path: Path, *, seconds: WriteObserver, sync: bool = True) -> None:
        """Repair an existing file; a new one is created by the first record.

        Args:
            seconds: Told the wall seconds of each write and sync.
            sync: Wait for the disk. Without it a record survives its process, but not a crash of the machine.
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
            _fence(self._file)
            if self._sync:
                sync_directory(self._path.parent)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        if self._sync:
            os.fsync(self._file)


def _fence(file: int) -> None:
    """Let nobody else append to a file for as long as it is open.

    The locks of runs and shards are on files of their own. A volume's server that has not heard of a machine for some
    time gives up its locks, and another machine gets them. When the first one is heard of again, NFS refuses its writes
    only to files on which it has lost a lock (Linux: `nfs.recover_lost_locks` is off), CephFS all.

    Raises:
        OSError: Another process has the file.
    """
    if not try_lock(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)):
        raise OSError(errno.EAGAIN, "another process writes to this file")


def try_lock(lock: Callable[[], None]) -> bool:
    """Take a lock, which raises OSError if it cannot; False if another process has it.

    Some mounted volumes do not support locks: there the operator's Job ensures one pod per shard.
    """
    try:
        lock()
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return True


def repair(path: Path) -> None:
    """Cut off a last line without a newline: its trajectory never counted and will be run again."""
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
    """Make the name of a new file as durable as its content."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def whole_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Lines of a file and their positions, `file:line`, without blank lines and an incomplete last line.

    Raises:
        FileNotFoundError: There is no such file.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # some editors write one
            if line.endswith(b"\n") and line.strip():
                yield f"{path}:{number}", line


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a whole file, durably: a reader, or a crash, sees the old content or the new."""
    write_chunks_atomically(path, (data,))


def write_chunks_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """`write_atomically` for content in chunks."""
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
    """A unique temporary name, because several processes may write the same file."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")


def remove_partials(directory: Path) -> None:
    """Remove temporary files of killed writers. No writer may be running."""
    for path in directory.glob(".*.partial"):
        if _PARTIAL.search(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")
