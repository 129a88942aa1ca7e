"""The directory of a cache: each model whole or not at all, fetched once, the least recently used removed for others.

models/KEY/IDENTITY/manifest.json     a model that is whole; engines that use it hold this file
models/KEY/IDENTITY/snapshots/COMMIT/ its files; contents/DIGEST/ if they are of a bucket
parts/KEY@IDENTITY@NODE/              a model while it is fetched, and what a fetch that was killed left
parts/KEY@IDENTITY@NODE.json          how much room it is going to take
known/KEY/REVISION                    the identity that a branch had last
locks/                                of each model: who fetches it; `room`: who decides what is removed
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kuberoll_workers.data.model_cache.locks import alone, hold, is_locked, locked
from kuberoll_workers.data.model_cache.source import (
    ModelRefused,
    ModelUnavailable,
    RemoteFile,
    RemoteModel,
    Source,
    SourceUnreachable,
    digests_of,
    in_threads,
)

_log = logging.getLogger(__name__)

MANIFEST: Final = "manifest.json"

GRACE_SECONDS: Final = 900.0
"""Seconds in which an engine begins with a model that was fetched or found for it; until then it is not removed."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOTHING_FREE: Final = 1 << 20
_REPORT_SECONDS: Final = 10.0
_TRIES: Final = 2


class CachedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a model in the cache.

    Attributes:
        algorithm, stated: Digest that its origin states; empty: it states none.
    """

    name: str
    size: int
    sha256: str
    algorithm: str = ""
    stated: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache has of a model."""

    source: str
    place: str
    identity: str
    directory: str
    files: list[CachedFile]
    format: int = 1

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A model in the cache, or its place there."""

    key: str
    identity: str
    path: Path

    @property
    def manifest_path(self) -> Path:
        return self.path / MANIFEST

    def read(self) -> Manifest | None:
        """Its manifest; None if it is not there. It is renamed into its place when it is whole."""
        try:
            return msgspec.json.decode(self.manifest_path.read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError):
            return None


@dataclass(frozen=True, slots=True)
class Report:
    """What obtaining a model took.

    Attributes:
        path: Directory with the model's files.
        fetched: Bytes that were fetched; 0: the cache had it.
    """

    path: Path
    fetched: int = 0


class Store:
    """A cache's directory."""

    def __init__(
        self, root: Path, *, node: str, limit: int | None = None, digests: bool = False, grace: float = GRACE_SECONDS
    ) -> None:
        """
        Args:
            node: Name of this machine; others may share the directory.
            limit: Bytes that all models may have; None: as much as there is room for.
            digests: Read whole models for their digests each time, not only when they are fetched.
        """
        self._root = root
        self._node = re.sub(r"[^A-Za-z0-9.-]", "-", node) or "node"
        self._limit = limit
        self._digests = digests
        self._grace = grace

    def obtain(self, source: Source) -> Report:
        """Find a model in the cache, or fetch it.

        Raises:
            ModelRefused: It does not exist, may not be read, or is larger than the cache.
            ModelUnavailable: It cannot be fetched now; the message says why.
        """
        self._prepare()
        try:
            found = source.find()
        except SourceUnreachable as error:
            return self._obtain_unasked(source, error)
        entry = self._entry(source, found.identity)
        if self._problem(entry, found) is None:
            self._remember(source, found.identity)
            return Report(entry.path / found.directory)
        name = f"{source.name} ({found.identity[:12]})"
        with locked(self._lock(entry), lambda: _log.info("%s: another pod fetches it; waiting", name)) as exclusive:
            # Another pod may have fetched it meanwhile.
            if (problem := self._problem(entry, found)) is None:
                self._remember(source, found.identity)
                return Report(entry.path / found.directory)
            if entry.path.exists():
                _log.warning("%s is fetched again: %s", name, problem)
                self._remove(entry.path)
            self._fetch(source, found, entry, exclusive=exclusive)
        self._remember(source, found.identity)
        return Report(entry.path / found.directory, fetched=found.size)

    def _obtain_unasked(self, source: Source, why: SourceUnreachable) -> Report:
        """What the cache has while the origin does not answer."""
        identity = source.known or self._known(source)
        entry = None if identity is None else self._entry(source, identity)
        if entry is None or (manifest := entry.read()) is None:
            raise ModelUnavailable(f"{why}; and the cache does not have it") from why
        if (problem := self._problem(entry, None)) is not None:
            raise ModelUnavailable(f"{why}; and what the cache has is damaged: {problem}") from why
        _log.warning("%s; the cache has %s", why, identity)
        return Report(entry.path / manifest.directory)

    def _prepare(self) -> None:
        try:
            for name in ("models", "parts", "locks", "known"):
                (self._root / name).mkdir(parents=True, exist_ok=True)
            if not os.access(self._root / "parts", os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            words = f"{self._root}: {error.strerror}: the model cache must be writable for user {os.getuid()}"
            raise ModelUnavailable(f"{words}, as with `install -d -o {os.getuid()} DIRECTORY` on the node") from error

    # What is there.

    def _entry(self, source: Source, identity: str) -> _Entry:
        key = _key(source)
        return _Entry(key, identity, self._root / "models" / key / identity)

    def _lock(self, entry: _Entry) -> Path:
        return self._root / "locks" / f"{entry.key}@{entry.identity}"

    def _known_path(self, source: Source) -> Path:
        revision = hashlib.sha256(source.revision.encode()).hexdigest()[:16]
        return self._root / "known" / _key(source) / revision

    def _known(self, source: Source) -> str | None:
        with contextlib.suppress(OSError):
            return self._known_path(source).read_text() or None
        return None

    def _remember(self, source: Source, identity: str) -> None:
        path = self._known_path(source)
        if self._known(source) == identity:
            return
        path.parent.mkdir(exist_ok=True)
        fresh = path.with_name(f".{path.name}.{self._node}.{os.getpid()}")
        fresh.write_text(identity)
        fresh.rename(path)

    def _problem(self, entry: _Entry, found: RemoteModel | None) -> str | None:
        """Why a model cannot be loaded from the cache; None: it can, and is kept for an engine that begins soon.

        Args:
            found: What its origin says of it; None: it was not asked.
        """
        # Who wants to remove it holds it alone.
        if (held := hold(entry.manifest_path)) is None:
            return "it is not there"
        with held:
            if (manifest := entry.read()) is None:
                return "its manifest cannot be read"
            if found is not None and (problem := _difference(manifest, found.files)) is not None:
                return problem
            directory = entry.path / manifest.directory
            for file in manifest.files:
                try:
                    size = (directory / file.name).stat().st_size
                except OSError as error:
                    return f"{file.name}: {error.strerror}"
                if size != file.size:
                    return f"{file.name} has {size} bytes of {file.size}"
            if self._digests:
                _log.info("%s: reading %s for its digests", manifest.source, _amount(manifest.size))
                for file, (sha256, _) in zip(
                    manifest.files,
                    in_threads(lambda file: digests_of(directory / file.name, ""), manifest.files),
                    strict=True,
                ):
                    if sha256 != file.sha256:
                        return f"{file.name} has the SHA-256 {sha256}, and had {file.sha256}"
            os.utime(entry.manifest_path)
        return None

    def _entries(self) -> list[tuple[float, int, _Entry]]:
        """All models, with the time of their last use and their size, the least recently used first."""
        found = []
        for path in (self._root / "models").glob(f"*/*/{MANIFEST}"):
            entry = _Entry(path.parent.parent.name, path.parent.name, path.parent)
            if (manifest := entry.read()) is not None:
                with contextlib.suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime, manifest.size, entry))
        return sorted(found, key=lambda item: item[:2])

    # Fetching.

    def _fetch(self, source: Source, found: RemoteModel, entry: _Entry, *, exclusive: bool) -> None:
        alone_here = "" if exclusive else f"@{os.getpid()}-{time.time_ns()}"
        part = self._root / "parts" / f"{entry.key}@{entry.identity}@{self._node}{alone_here}"
        plan = part.with_name(f"{part.name}.json")
        try:
            self._make_room(source.name, found.size, part, plan)
            directory = part / found.directory
            directory.mkdir(parents=True, exist_ok=True)
            with _reporting(source.name, found.size, part):
                files = self._download(source, found, directory)
            shutil.rmtree(directory / ".cache", ignore_errors=True)
            manifest = Manifest(
                source=source.name,
                place=source.place,
                identity=found.identity,
                directory=found.directory,
                files=files,
            )
            _write_synced(part / MANIFEST, msgspec.json.encode(manifest))
            entry.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.rename(entry.path)
            except OSError as error:
                # Without locks another pod may have been faster: what it has is as good.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                self._remove(part)
            _sync_directory(entry.path.parent)
        except (OSError, ModelUnavailable) as error:
            free = shutil.disk_usage(self._root).free
            # Not every library says why it could not write.
            if not _is_full(error) and (free > _NOTHING_FREE or not part.exists()):
                if isinstance(error, ModelUnavailable):
                    raise
                raise ModelUnavailable(f"{self._root}: {source.name}: {error}") from error
            self._remove(part)
            raise ModelUnavailable(
                f"{self._root} is full: {source.name} needs {_amount(found.size)}, and {_amount(free)} were left; "
                "what was fetched of it is removed"
            ) from error
        finally:
            if not part.exists():
                plan.unlink(missing_ok=True)

    def _download(self, source: Source, found: RemoteModel, directory: Path) -> list[CachedFile]:
        """Fetch the files, and those once more whose digests are wrong."""
        left = list(found.files)
        checked: dict[str, CachedFile] = {}
        for attempt in range(_TRIES):
            in_threads(lambda file: source.fetch(found, file, directory), left)
            results = in_threads(lambda file: self._checked(source, found, file, directory), left)
            checked |= {item.name: item for item in results if isinstance(item, CachedFile)}
            wrong = {file.name: item for file, item in zip(left, results, strict=True) if isinstance(item, str)}
            left = [file for file in left if file.name in wrong]
            if not left:
                return [checked[file.name] for file in found.files]
            for file in left:
                _log.warning("%s: %s", source.name, wrong[file.name])
                (directory / file.name).unlink(missing_ok=True)
            if attempt == _TRIES - 1:
                raise ModelUnavailable(f"model {source.name}: {next(iter(wrong.values()))}; it was fetched twice")
        raise AssertionError

    def _checked(self, source: Source, found: RemoteModel, file: RemoteFile, directory: Path) -> CachedFile | str:
        """A file that was fetched, durable; or what is wrong with it."""
        path = directory / file.name
        if (size := path.stat().st_size) != file.size:
            return f"{file.name} has {size} bytes of {file.size}"
        sha256, digest = digests_of(path, file.algorithm)
        stated = bool(file.algorithm)
        if stated and digest != file.digest:
            if source.is_digest(found, file):
                return f"{file.name} has the {file.algorithm} {digest}, and its origin says {file.digest}"
            stated = False
        with path.open("rb") as written:
            os.fsync(written.fileno())
        return CachedFile(
            name=file.name,
            size=file.size,
            sha256=sha256,
            algorithm=file.algorithm if stated else "",
            stated=file.digest if stated else "",
        )

    # Room.

    def _make_room(self, name: str, needed: int, part: Path, plan: Path) -> None:
        """Remove models that are not used until there is room, and take it.

        Raises:
            ModelRefused: The model is larger than the cache.
            ModelUnavailable: Too much of the cache is in use.
        """
        if self._limit is not None and needed > self._limit:
            raise ModelRefused(
                f"model {name} has {_amount(needed)}, and the model cache may have {_amount(self._limit)} in all: "
                "raise jobs.modelCache.size of the chart, or set model.cache: false, so that engines fetch it"
            )
        with locked(self._root / "locks" / "room"):
            there = _written(part)
            others = self._other_parts(part)
            entries = self._entries()
            total = sum(size for _, size, _ in entries)
            promised = sum(size for size, _ in others)
            outstanding = sum(max(0, size - written) for size, written in others)
            while True:
                free = shutil.disk_usage(self._root).free
                over = 0 if self._limit is None else total + promised + needed - self._limit
                short = needed - there + outstanding - free
                if max(over, short) <= 0:
                    break
                if (victim := self._remove_one(entries)) is None:
                    bound = "" if over <= 0 else f" of the {_amount(self._limit or 0)} that it may have"
                    raise ModelUnavailable(
                        f"{self._root}: no room for model {name}: it needs {_amount(needed)}, {_amount(free)} are free "
                        f"on the disk, and the cache has {_amount(total + promised)}{bound}; engines use all of it, or "
                        "are about to"
                    )
                total -= victim
            plan.write_bytes(msgspec.json.encode({"bytes": needed}))

    def _other_parts(self, own: Path) -> list[tuple[int, int]]:
        """Size, and bytes that are written, of what others fetch now; what they have left behind is removed."""
        found = []
        for plan in (self._root / "parts").glob("*.json"):
            part = plan.with_suffix("")
            if part == own:
                continue
            key, identity, *_ = part.name.split("@")
            if is_locked(self._root / "locks" / f"{key}@{identity}"):
                with contextlib.suppress(OSError, msgspec.DecodeError, KeyError):
                    size = int(msgspec.json.decode(plan.read_bytes(), type=dict[str, int])["bytes"])
                    found.append((size, _written(part)))
                continue
            self._remove(part)
            plan.unlink(missing_ok=True)
        for trash in (self._root / "parts").glob("removed-*"):
            shutil.rmtree(trash, ignore_errors=True)
        return found

    def _remove_one(self, entries: list[tuple[float, int, _Entry]]) -> int | None:
        """Remove the least recently used model that nobody uses; its size. None: all are used."""
        while entries:
            used, size, entry = entries.pop(0)
            with alone(entry.manifest_path) as free:
                if not free:
                    # Its engine cannot write here: it counts as used until now.
                    with contextlib.suppress(OSError):
                        os.utime(entry.manifest_path)
                    continue
                if time.time() - entry.manifest_path.stat().st_mtime < self._grace:
                    continue
                name = entry.key
                if (manifest := entry.read()) is not None:
                    name = f"{manifest.source} ({manifest.identity[:12]})"
                ago = (time.time() - used) / 3600
                _log.info("%s is removed: %s, last used %.1f hours ago", name, _amount(size), ago)
                self._remove(entry.path)
            return size
        return None

    def _remove(self, path: Path) -> None:
        """Remove a directory, first from its place."""
        trash = self._root / "parts" / f"removed-{self._node}-{os.getpid()}-{time.time_ns()}"
        with contextlib.suppress(FileNotFoundError):
            path.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)


def _key(source: Source) -> str:
    """Directory name of a model, the same for every revision, and different for each server and part."""
    digest = hashlib.sha256("\0".join((source.part, source.place, source.name)).encode()).hexdigest()[:16]
    words = re.sub(r"[^A-Za-z0-9._-]+", "--", source.name.partition("://")[2] or source.name).strip(".-")
    part = "" if source.part == "model" else f"{source.part}--"
    return f"{part}{words[-80:]}--{digest}"


def _difference(manifest: Manifest, files: Sequence[RemoteFile]) -> str | None:
    """Why a model in the cache is not what its origin says; None: it is."""
    there = {file.name: file for file in manifest.files}
    for file in files:
        kept = there.get(file.name)
        if kept is None:
            return f"{file.name} is missing"
        if kept.size != file.size:
            return f"{file.name} has {kept.size} bytes, and its origin says {file.size}"
        stated = kept.sha256 if file.algorithm == "sha256" else kept.stated if file.algorithm == kept.algorithm else ""
        if stated and file.digest and stated != file.digest:
            return f"{file.name} has the {file.algorithm} {stated}, and its origin says {file.digest}"
    return None


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def _written(directory: Path) -> int:
    """Bytes on the disk below a directory that others may change."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512  # noqa: PTH118
    return total


@contextmanager
def _reporting(name: str, size: int, part: Path) -> Iterator[None]:
    """Log how far a fetch is, while the context lasts."""
    end = threading.Event()
    began, before = time.monotonic(), _written(part)

    def report() -> None:
        while not end.wait(_REPORT_SECONDS):
            there = _written(part)
            rate = (there - before) / (time.monotonic() - began)
            share = 100 * min(there, size) // max(1, size)
            _log.info("%s: %s of %s (%d %%), %s/s", name, _amount(there), _amount(size), share, _amount(int(rate)))

    _log.info("%s: fetching %s", name, _amount(size))
    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
    _log.info("%s: fetched and checked in %.1f s", name, time.monotonic() - began)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        # Not all storage can.
        with contextlib.suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)


def _amount(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
