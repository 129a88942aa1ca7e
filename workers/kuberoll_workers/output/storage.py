"""Storage of a run's output: a local directory, or an object store behind an fsspec URI.

A run consists of journals (`shard-00000`, `failures`, `dropped`), which only grow, and of files that are written as a
whole. In a directory a journal is one file of JSON lines. Object stores cannot append, so there a journal is a folder
of parts, each an object that is complete or absent; a finished journal becomes one file, as in a directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kuberoll_workers.data.extras import unusable_store
from kuberoll_workers.output.journal import (
    FileJournal,
    Journal,
    WriteObserver,
    remove_partials,
    try_lock,
    whole_lines,
    write_atomically,
    write_chunks_atomically,
)
from kuberoll_workers.output.part_journal import PartJournal, PartLimits

CONSUMER = "consumer-"
"""What names of files of consumers begin with: they are written at any time, also after the run."""

_LOCK = ".lock"
_SHARD_LOCKS = ".shards.lock"
_HEARTBEAT_SECONDS = 20.0
_STALE_SECONDS = 90.0
_SUFFIXES = {".json", ".jsonl", ".parquet", ".html"}


class StorageError(Exception):
    """The storage cannot be used; the message names the reason and the remedy."""


class ShardHeld(StorageError):
    """Another worker holds the lock of a shard.

    Attributes:
        shard: Its number.
        lock: File of the locks, which the other worker has open.
    """

    def __init__(self, message: str, *, shard: int, lock: Path) -> None:
        super().__init__(message)
        self.shard = shard
        self.lock = lock


class Storage(Protocol):
    """Storage of one run.

    Attributes:
        location: Path or URI, as the user gave it.
    """

    location: str

    def journal(
        self,
        name: str,
        *,
        owner: str,
        seconds: WriteObserver,
        shared: bool = False,
        written: Callable[[str, bytes], None] | None = None,
    ) -> Journal:
        """Open a journal for appending.

        Args:
            owner: Name of the writer, unique among the writers of the journal.
            shared: True if others may write to it, too.
            seconds: Told the wall seconds of each write.
            written: Called with the name within the run, and the content, of each part of an object store when it is
                there; a directory has none.
        """
        ...

    def lines(self, name: str) -> Iterator[tuple[str, bytes]]:
        """Complete lines of a journal and their positions; empty if it does not exist.

        Each line that was there when the reading began comes; some come twice if files are merged meanwhile.
        """
        ...

    def shards(self) -> list[str]:
        """Names of the existing shards, sorted."""
        ...

    def read(self, file: str) -> bytes | None:
        """Content of a file; None if it does not exist."""
        ...

    def write(self, file: str, data: bytes) -> str:
        """Write a whole file, durably; returns its location."""
        ...

    def upload(self, file: str, source: Path) -> str:
        """Copy a local file into the storage, atomically and durably; returns its location."""
        ...

    def fetch(self, file: str, target: Path) -> bool:
        """Copy a file to a local one; False if it does not exist."""
        ...

    def stamp(self, file: str) -> object:
        """Something that is another after a file was replaced; None if it does not exist."""
        ...

    def journal_files(self, name: str) -> list[str]:
        """Paths of the files that a journal has now."""
        ...

    def remove_files(self, paths: Sequence[str]) -> None:
        """Remove files of a journal whose content has been written elsewhere."""
        ...

    def compact(self, name: str) -> None:
        """Merge the files of a journal into one; a crash may duplicate lines, but never loses any.

        Its workers have ended. A consumer may write at any time, so what it may be adding to stays as it is.
        """
        ...

    def files(self) -> list[str]:
        """Locations of the run's files including journals, sorted."""
        ...

    def where(self, name: str) -> str:
        """Location of a journal or file, for messages."""
        ...

    def lock(self) -> None:
        """Lock the storage against other runs.

        Raises:
            StorageError: Another run holds the lock.
        """
        ...

    def unlock(self) -> None:
        """Release the lock."""
        ...

    def hold_shards(self, shards: Collection[int]) -> None:
        """Lock these shards against other workers while this process lives.

        Raises:
            ShardHeld: Another process is writing one of them.
        """
        ...

    def release_shards(self) -> None:
        """Release the locks of the shards."""
        ...


def open_storage(location: str, *, parts: PartLimits | None = None) -> Storage:
    """Storage at a path or URI.

    Raises:
        StorageError: The kind of storage is unknown, or its package is not installed.
    """
    scheme, separator, rest = location.partition("://")
    if not separator:
        return DirectoryStorage(Path(location).expanduser())
    if scheme == "file":
        return DirectoryStorage(Path(rest))
    return ObjectStorage(location, parts or PartLimits())


class DirectoryStorage:
    """Local directory or mounted volume."""

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self.path = path
        self._lock: int | None = None
        self._shard_locks: int | None = None

    def journal(
        self,
        name: str,
        *,
        owner: str,
        seconds: WriteObserver,
        shared: bool = False,
        written: Callable[[str, bytes], None] | None = None,
    ) -> Journal:
        del written  # there are no parts
        if not shared:
            return FileJournal(self.path / f"{name}.jsonl", seconds=seconds)
        # One file for each writer: network file systems interleave the lines of several writers, and a new writer cuts
        # off an incomplete last line, which another one may be about to finish.
        (self.path / name).mkdir(exist_ok=True)
        return FileJournal(self.path / name / f"{owner}.jsonl", seconds=seconds)

    def lines(self, name: str) -> Iterator[tuple[str, bytes]]:
        return _merged_lines(
            self.journal_files(name), str(self.path / f"{name}.jsonl"), lambda file: whole_lines(Path(file))
        )

    def journal_files(self, name: str) -> list[str]:
        # Before the one file: what is merged meanwhile is in one of the two.
        parts = sorted((self.path / name).glob("*.jsonl"))
        whole = self.path / f"{name}.jsonl"
        return [str(path) for path in (*([whole] if whole.exists() else []), *parts)]

    def remove_files(self, paths: Sequence[str]) -> None:
        for path in paths:
            Path(path).unlink(missing_ok=True)
        for folder in {Path(path).parent for path in paths} - {self.path}:
            # Unless a consumer has a file there.
            with contextlib.suppress(OSError):
                folder.rmdir()

    def stamp(self, file: str) -> object:
        try:
            found = (self.path / file).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def shards(self) -> list[str]:
        return sorted({path.stem for kind in ("jsonl", "parquet") for path in self.path.glob(f"shard-*.{kind}")})

    def read(self, file: str) -> bytes | None:
        try:
            return (self.path / file).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, file: str, data: bytes) -> str:
        write_atomically(self.path / file, data)
        return str(self.path / file)

    def upload(self, file: str, source: Path) -> str:
        # A rename across file systems is not atomic, so the file is copied next to its target first.
        with source.open("rb") as old:
            write_chunks_atomically(self.path / file, iter(lambda: old.read(1 << 20), b""))
        return str(self.path / file)

    def fetch(self, file: str, target: Path) -> bool:
        path = self.path / file
        if not path.exists():
            return False
        target.unlink(missing_ok=True)
        target.symlink_to(path.resolve())
        return True

    def compact(self, name: str) -> None:
        whole = self.path / f"{name}.jsonl"
        parts = [path for path in self.journal_files(name) if not Path(path).name.startswith(CONSUMER)]
        if parts in ([], [str(whole)]):
            # One file from the start, or none: a writer that had nothing to write has made the directory.
            with contextlib.suppress(OSError):
                (self.path / name).rmdir()
            return
        lines = [line for path in parts for _, line in whole_lines(Path(path))]
        if lines:
            write_atomically(whole, b"".join(lines))
        self.remove_files([path for path in parts if path != str(whole)])

    def files(self) -> list[str]:
        return sorted(str(path) for path in self.path.glob("*.*") if path.suffix in _SUFFIXES)

    def where(self, name: str) -> str:
        path = self.path / name
        return str(path if path.suffix else path.with_suffix(".jsonl"))

    def lock(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be created: {error.strerror}") from error
        try:
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageError(
                f"{self.path / _LOCK}: cannot be opened: {error.strerror}; a run must be able to write to its "
                "directory: choose another --output, or fix its permissions"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.unlock()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise StorageError(
                    f"{self.path} is in use by another run: wait for it or choose another --output"
                ) from error
            raise StorageError(
                f"{self.path / _LOCK}: cannot be locked: {error.strerror}; without a lock another run could write to "
                "the directory, too: choose an --output on a file system with locks (flock), or in an object store"
            ) from error
        remove_partials(self.path)

    def hold_shards(self, shards: Collection[int]) -> None:
        lock = self.path / _SHARD_LOCKS
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            for shard in shards:
                # One byte for each shard: the kernel releases the locks when the process ends, however it ends, and a
                # volume's server those of a machine that it has not heard of for some time.
                if not try_lock(partial(fcntl.lockf, descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, shard)):
                    raise ShardHeld(
                        f"{self.path}: another worker, of this run or of one that was killed, is still writing "
                        f"shard {shard}",
                        shard=shard,
                        lock=lock,
                    )
        except BaseException:
            os.close(descriptor)
            raise
        self._shard_locks = descriptor

    def release_shards(self) -> None:
        if self._shard_locks is not None:
            os.close(self._shard_locks)
            self._shard_locks = None

    def unlock(self) -> None:
        # The kernel also does this when the process dies.
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _merged_lines(
    files: Sequence[str], whole: str, read: Callable[[str], Iterator[tuple[str, bytes]]]
) -> Iterator[tuple[str, bytes]]:
    """Lines of a journal's files, which may be merged into one meanwhile: what is gone is in the one."""
    gone = False
    for file in files:
        try:
            yield from read(file)
        except FileNotFoundError:
            gone = True
    if gone:
        with contextlib.suppress(FileNotFoundError):
            yield from read(whole)


def modification_time(entry: Mapping[str, Any]) -> float | None:
    """Time of an object's last change by its store's clock; None if the store does not say."""
    # The stores' libraries have no common name for it.
    for name in ("LastModified", "last_modified", "updated", "mtime", "created"):
        value = entry.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return float(value.timestamp())
    return None


class ObjectStorage:
    """Object store through fsspec: s3:

    , gs:

    , abfs:

    , memory:

    and all other installed ones.

    The store's own library finds the credentials: environment variables, files, roles.
    """

    def __init__(self, uri: str, parts: PartLimits) -> None:
        import fsspec

        self.location = uri.rstrip("/")
        self._parts = parts
        try:
            # Others write to the store, too, so listings must not be cached.
            self._fs, root = fsspec.core.url_to_fs(self.location, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StorageError(f"{uri}: {unusable_store(uri, error)}") from error
        self._root = str(root).rstrip("/")
        self._me = uuid.uuid4().hex
        # Owner of the lock under which this process writes; None: of no run that is known here.
        self._leader: str | None = None
        self._beat: threading.Thread | None = None
        self._stop = threading.Event()

    def journal(
        self,
        name: str,
        *,
        owner: str,
        seconds: WriteObserver,
        shared: bool = False,
        written: Callable[[str, bytes], None] | None = None,
    ) -> Journal:
        del shared  # every writer has its own parts
        return PartJournal(
            self._fs,
            f"{self._root}/{name}",
            owner=owner,
            seconds=seconds,
            limits=self._parts,
            written=None if written is None else lambda part, data: written(f"{name}/{part}", data),
        )

    def lines(self, name: str) -> Iterator[tuple[str, bytes]]:
        return _merged_lines(self.journal_files(name), f"{self._root}/{name}.jsonl", self._lines_of)

    def _lines_of(self, path: str) -> Iterator[tuple[str, bytes]]:
        with self._fs.open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n") and line.strip():
                    yield f"{self._fs.unstrip_protocol(path)}:{number}", line

    def journal_files(self, name: str) -> list[str]:
        # Before the one file: what is merged meanwhile is in one of the two.
        parts, whole = self._list(f"{self._root}/{name}"), f"{self._root}/{name}.jsonl"
        return [*([whole] if self._fs.exists(whole) else []), *parts]

    def remove_files(self, paths: Sequence[str]) -> None:
        self._check_lead()
        if not paths:
            return
        try:
            self._fs.rm(list(paths))
        except FileNotFoundError:
            # Another worker of the shard, which goes on where nothing reaches it, has merged them, too.
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(path)

    def stamp(self, file: str) -> object:
        try:
            return self._fs.ukey(f"{self._root}/{file}")
        except FileNotFoundError:
            return None

    def shards(self) -> list[str]:
        names = {Path(path).name.removesuffix(".parquet").removesuffix(".jsonl") for path in self._list(self._root)}
        return sorted(name for name in names if name.startswith("shard-"))

    def read(self, file: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{file}"))
        except FileNotFoundError:
            return None

    def write(self, file: str, data: bytes) -> str:
        self._check_lead()
        self._fs.pipe_file(f"{self._root}/{file}", data)
        return f"{self.location}/{file}"

    def upload(self, file: str, source: Path) -> str:
        self._check_lead()
        self._fs.put_file(str(source), f"{self._root}/{file}")
        return f"{self.location}/{file}"

    def fetch(self, file: str, target: Path) -> bool:
        try:
            self._fs.get_file(f"{self._root}/{file}", str(target))
        except FileNotFoundError:
            return False
        return True

    def compact(self, name: str) -> None:
        parts = self._list(f"{self._root}/{name}")
        if not parts:
            return
        with tempfile.TemporaryDirectory(prefix="kuberoll-") as directory:
            whole = Path(directory) / f"{name}.jsonl"
            with whole.open("wb") as file:
                for _, line in self.lines(name):
                    file.write(line)
            self.upload(whole.name, whole)
        self.remove_files(parts)

    def files(self) -> list[str]:
        return [
            str(self._fs.unstrip_protocol(path))
            for path in self._list(self._root)
            if not Path(path).name.startswith(_LOCK)
        ]

    def where(self, name: str) -> str:
        return f"{self.location}/{name}"

    def lock(self) -> None:
        """Take the lock object. Object stores have no locks, so it is a lease that is renewed.

        Two runs that start at the same moment may both get it; an existing lock is always detected.
        """
        try:
            self._take()
        except StorageError:
            raise
        except Exception as error:
            # Every store's library raises its own kinds: no such bucket, no credentials, no network.
            raise StorageError(f"{self.location}: {type(error).__name__}: {error}") from error
        self._leader = self._me
        self._beat = threading.Thread(target=self._keep, name="kuberoll-lease", daemon=True)
        self._beat.start()

    def _take(self) -> None:
        held = self.read(_LOCK)
        if held is not None and self._owner(held) != self._me and not self._has_lapsed() and self._is_renewed(held):
            raise StorageError(
                f"{self.location} is in use by another run: wait for it (the lock of a dead run expires after "
                f"{_STALE_SECONDS:.0f} s) or choose another --output"
            )
        self._renew()

    def _owner(self, held: bytes) -> str:
        """Owner of a lock object; empty if a writer that died left it empty.

        Raises:
            StorageError: It is not a lock of KubeRoll.
        """
        if not held.strip(b"\0 \n"):
            return ""
        try:
            return str(json.loads(held)["owner"])
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"{self.location}/{_LOCK} is not a lock of KubeRoll: remove it if no run is writing there, or choose "
                "another --output"
            ) from error

    def _has_lapsed(self) -> bool:
        """True if the lock object is too old by the store's own clock; those of two machines differ."""
        probe = f"{self._root}/{_LOCK}-{self._me}"
        try:
            self._fs.pipe_file(probe, b"")
            now, then = (modification_time(self._fs.info(path)) for path in (probe, f"{self._root}/{_LOCK}"))
        except FileNotFoundError:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(probe)
        return now is not None and then is not None and now - then >= _STALE_SECONDS

    def _check_lead(self) -> None:
        """Find out whether another run has taken over, before something is replaced or removed.

        Raises:
            StorageError: One has: this process, or its machine, had stood still for longer than the lock lasts.
        """
        if self._leader is None:
            return
        held = self.read(_LOCK)
        if held is None or self._owner(held) != self._leader:
            raise StorageError(
                f"{self.location} was taken over by another run while this one stood still for more than "
                f"{_STALE_SECONDS:.0f} s: it writes nothing more; what it has stored counts, and the other run goes on"
            )

    def _is_renewed(self, held: bytes | None) -> bool:
        """True if another process rewrites the lock object within two heartbeats."""
        deadline = time.monotonic() + 2.5 * _HEARTBEAT_SECONDS
        while time.monotonic() < deadline:
            if self.read(_LOCK) != held:
                return True
            time.sleep(min(1.0, _HEARTBEAT_SECONDS / 4))
        return False

    def unlock(self) -> None:
        if self._beat is not None:
            self._stop.set()
            self._beat.join()
            self._beat = None
            # Another run's lock is not ours to remove.
            with contextlib.suppress(Exception):
                self._check_lead()
                self._fs.rm_file(f"{self._root}/{_LOCK}")
            self._leader = None

    def hold_shards(self, shards: Collection[int]) -> None:
        del shards
        # Every writer has its own parts, and a trajectory that is stored twice counts once. What replaces files is
        # written only under the lock of the run that this worker belongs to; pods have none.
        held = self.read(_LOCK)
        self._leader = None if held is None else self._owner(held)

    def release_shards(self) -> None:
        return None

    def _keep(self) -> None:
        while not self._stop.wait(_HEARTBEAT_SECONDS):
            # A lease survives a short failure of its renewal; writes report lasting ones.
            with contextlib.suppress(Exception):
                self._check_lead()
                self._renew()

    def _renew(self) -> None:
        lease = {"owner": self._me, "beat": uuid.uuid4().hex}
        self._fs.pipe_file(f"{self._root}/{_LOCK}", json.dumps(lease).encode())

    def _list(self, folder: str) -> list[str]:
        try:
            return sorted(str(path) for path in self._fs.ls(folder, detail=False) if str(path) != folder)
        except FileNotFoundError:
            return []
