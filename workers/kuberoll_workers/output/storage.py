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
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

from kuberoll_workers.output.journal import (
    FileJournal,
    Journal,
    WriteObserver,
    remove_partials,
    whole_lines,
    write_atomically,
    write_chunks_atomically,
)
from kuberoll_workers.output.part_journal import PartJournal, PartLimits

_LOCK = ".lock"
_SHARD_LOCKS = ".shards.lock"
_SHARD_PATIENCE_SECONDS = 20.0
_HEARTBEAT_SECONDS = 20.0
_STALE_SECONDS = 90.0
_SUFFIXES = {".json", ".jsonl", ".parquet", ".html"}


class StorageError(Exception):
    """The storage cannot be used; the message names the reason and the remedy."""


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
        """Complete lines of a journal and their positions; empty if it does not exist."""
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

    def remove_journal(self, name: str) -> None:
        """Remove a journal whose content has been written elsewhere."""
        ...

    def compact(self, name: str) -> None:
        """Merge a journal without writers into one file; a crash may duplicate lines, but never loses any."""
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
        """Lock these shards against other workers while this process lives; waits a moment for a worker that ends.

        Raises:
            StorageError: Another process is writing one of them.
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
        for path in (self.path / f"{name}.jsonl", *sorted((self.path / name).glob("*.jsonl"))):
            yield from whole_lines(path)

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

    def remove_journal(self, name: str) -> None:
        (self.path / f"{name}.jsonl").unlink(missing_ok=True)
        shutil.rmtree(self.path / name, ignore_errors=True)

    def compact(self, name: str) -> None:
        if not (self.path / name).is_dir():
            return  # one file from the start
        lines = [line for _, line in self.lines(name)]
        if lines:
            write_atomically(self.path / f"{name}.jsonl", b"".join(lines))
        shutil.rmtree(self.path / name)

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
            raise StorageError(
                f"{self.path} is in use by another run: wait for it or choose another --output"
            ) from error
        remove_partials(self.path)

    def hold_shards(self, shards: Collection[int]) -> None:
        descriptor = os.open(self.path / _SHARD_LOCKS, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + _SHARD_PATIENCE_SECONDS
        try:
            for shard in shards:
                # One byte for each shard: the kernel releases the locks when the process ends, however it ends.
                while not _lock_byte(descriptor, shard):
                    if time.monotonic() > deadline:
                        raise StorageError(
                            f"{self.path}: another worker, of this run or of one that was killed, is still writing "
                            f"shard {shard}: end it (`fuser {self.path / _SHARD_LOCKS}` names it), then use --resume"
                        )
                    time.sleep(0.05)
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


def _lock_byte(descriptor: int, shard: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, shard)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        # Some mounted volumes do not support locks; there, the operator's Job ensures one pod per shard.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return True


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
            raise StorageError(f"{uri}: {error}") from error
        self._root = str(root).rstrip("/")
        self._me = uuid.uuid4().hex
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
        for part in (*self._whole(name), *self._list(f"{self._root}/{name}")):
            with self._fs.open(part, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.endswith(b"\n") and line.strip():
                        yield f"{self._fs.unstrip_protocol(part)}:{number}", line

    def shards(self) -> list[str]:
        names = {Path(path).name.removesuffix(".parquet").removesuffix(".jsonl") for path in self._list(self._root)}
        return sorted(name for name in names if name.startswith("shard-"))

    def read(self, file: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{file}"))
        except FileNotFoundError:
            return None

    def write(self, file: str, data: bytes) -> str:
        self._fs.pipe_file(f"{self._root}/{file}", data)
        return f"{self.location}/{file}"

    def upload(self, file: str, source: Path) -> str:
        self._fs.put_file(str(source), f"{self._root}/{file}")
        return f"{self.location}/{file}"

    def fetch(self, file: str, target: Path) -> bool:
        try:
            self._fs.get_file(f"{self._root}/{file}", str(target))
        except FileNotFoundError:
            return False
        return True

    def remove_journal(self, name: str) -> None:
        parts = [*self._whole(name), *self._list(f"{self._root}/{name}")]
        if parts:
            self._fs.rm(parts)

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
        self._fs.rm(parts)

    def files(self) -> list[str]:
        return [str(self._fs.unstrip_protocol(path)) for path in self._list(self._root) if Path(path).name != _LOCK]

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
        self._beat = threading.Thread(target=self._keep, name="kuberoll-lease", daemon=True)
        self._beat.start()

    def _take(self) -> None:
        held = self.read(_LOCK)
        lease = None if held is None else self._lease(held)
        if lease is not None and lease["owner"] != self._me:
            age = time.time() - lease["renewed"]
            # Clocks may differ: then wait and see whether the lease is renewed.
            if 0 <= age < _STALE_SECONDS or (age < 0 and self._is_renewed(held)):
                raise StorageError(
                    f"{self.location} is in use by another run: wait for it (the lock of a dead run expires after "
                    f"{_STALE_SECONDS:.0f} s) or choose another --output"
                )
        self._renew()

    def _lease(self, held: bytes) -> dict[str, Any] | None:
        """Content of a lock object; None if a writer that died left it empty.

        Raises:
            StorageError: It is not a lock of KubeRoll.
        """
        if not held.strip(b"\0 \n"):
            if self._is_renewed(held):
                raise StorageError(f"{self.location} is in use by another run: wait for it or choose another --output")
            return None
        try:
            lease = json.loads(held)
            return {"owner": str(lease["owner"]), "renewed": float(lease["renewed"])}
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"{self.location}/{_LOCK} is not a lock of KubeRoll: remove it if no run is writing there, or choose "
                "another --output"
            ) from error

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
            with contextlib.suppress(Exception):
                self._fs.rm_file(f"{self._root}/{_LOCK}")

    def hold_shards(self, shards: Collection[int]) -> None:
        del shards  # every writer has its own parts, and a trajectory that is stored twice counts once

    def release_shards(self) -> None:
        return None

    def _keep(self) -> None:
        while not self._stop.wait(_HEARTBEAT_SECONDS):
            # A lease survives a short failure of its renewal; writes report lasting ones.
            with contextlib.suppress(Exception):
                self._renew()

    def _renew(self) -> None:
        self.write(_LOCK, json.dumps({"owner": self._me, "renewed": time.time()}).encode())

    def _whole(self, name: str) -> list[str]:
        path = f"{self._root}/{name}.jsonl"
        return [path] if self._fs.exists(path) else []

    def _list(self, folder: str) -> list[str]:
        try:
            return sorted(str(path) for path in self._fs.ls(folder, detail=False) if str(path) != folder)
        except FileNotFoundError:
            return []
