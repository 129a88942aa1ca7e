"""Places where versions of weights are published: a directory, or a folder of an object store.

A version appears as a whole or not at all: in a directory by a rename, in an object store because its description comes
last.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from kuberoll_workers.data.extras import unusable_store
from kuberoll_workers.data.weights.manifest import MANIFEST_FILE, directory_name, version_of_directory
from kuberoll_workers.data.weights.tensors import sync

_LOCK = ".publisher.lock"
_PART = ".part"


class LocationError(Exception):
    """Weights cannot be stored there; the message names the place and the remedy."""


class Location(Protocol):
    """A place with versions."""

    def versions(self) -> list[int]:
        """Versions that are there as a whole, in order."""
        ...

    def uri(self, version: int) -> str:
        """Where a version is."""
        ...

    def read(self, version: int, name: str) -> bytes | None:
        """Content of a file of a version; None: there is none."""
        ...

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Hold the place against other publishers.

        Raises:
            LocationError: Another one publishes there.
        """
        ...

    def workspace(self, version: int) -> contextlib.AbstractContextManager[Path]:
        """An empty directory for the files of a version; it is removed at the end."""
        ...

    def commit(self, version: int, made: Path) -> None:
        """Make the files of a workspace a version.

        Raises:
            LocationError: The version is there already.
        """
        ...

    def add(self, version: int, made: Path, name: str) -> None:
        """Add a file of a workspace to a version that is there."""
        ...

    def remove(self, version: int) -> None:
        """Remove a version."""
        ...


def open_location(location: str | Path) -> Location:
    """The place at a path or URI.

    Raises:
        LocationError: The kind of URI is unknown, or its package is not installed.
    """
    text = str(location)
    if "://" in text and not text.startswith("file://"):
        return ObjectLocation(text)
    return DirectoryLocation(Path(text.removeprefix("file://")).expanduser().resolve())


class DirectoryLocation:
    """A directory of this machine, or a mounted volume."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def versions(self) -> list[int]:
        names = [path.name for path in self._path.iterdir()] if self._path.is_dir() else []
        return sorted(version for name in names if (version := version_of_directory(name)) is not None)

    def uri(self, version: int) -> str:
        return str(self._path / directory_name(version))

    def read(self, version: int, name: str) -> bytes | None:
        try:
            return (self._path / directory_name(version) / name).read_bytes()
        except FileNotFoundError:
            return None

    @contextmanager
    def writing(self) -> Iterator[None]:
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise LocationError(
                f"{self._path}: cannot be written: {error.strerror}; choose another location"
            ) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise LocationError(
                    f"{self._path}: another process is publishing here: give each publisher a directory of its own"
                ) from error
            # Of publishers that were killed.
            for left in self._path.glob(f".*{_PART}"):
                shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def workspace(self, version: int) -> Iterator[Path]:
        path = self._path / f".{directory_name(version)}{_PART}"
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def commit(self, version: int, made: Path) -> None:
        for file in made.iterdir():
            sync(file)
        sync(made)
        try:
            # An empty directory would be replaced, but a version is never empty.
            made.rename(self._path / directory_name(version))
        except OSError as error:
            raise _taken(self.uri(version)) from error
        sync(self._path)

    def add(self, version: int, made: Path, name: str) -> None:
        sync(made / name)
        directory = self._path / directory_name(version)
        (made / name).rename(directory / name)
        sync(directory)

    def remove(self, version: int) -> None:
        path = self._path / directory_name(version)
        # No one shall find half of it.
        gone = self._path / f".{directory_name(version)}.removed{_PART}"
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


class ObjectLocation:
    """A folder of an object store, by fsspec."""

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            found: tuple[Any, str] = url_to_fs(self._uri)
        except (ImportError, ValueError) as error:
            raise LocationError(f"{uri}: {unusable_store(uri, error)}") from error
        self._filesystem, self._root = found[0], found[1].rstrip("/")

    def versions(self) -> list[int]:
        self._filesystem.invalidate_cache()
        # A version without description is one whose publisher was killed.
        found = self._filesystem.glob(f"{self._root}/*/{MANIFEST_FILE}")
        names = [str(path).split("/")[-2] for path in found]
        return sorted(version for name in names if (version := version_of_directory(name)) is not None)

    def uri(self, version: int) -> str:
        return f"{self._uri}/{directory_name(version)}"

    def read(self, version: int, name: str) -> bytes | None:
        try:
            return bytes(self._filesystem.cat_file(self._path(version, name)))
        except FileNotFoundError:
            return None

    @contextmanager
    def writing(self) -> Iterator[None]:
        # Object stores have no locks; `commit` refuses a version that is there.
        yield

    @contextmanager
    def workspace(self, version: int) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix=f"kuberoll-{directory_name(version)}-") as path:
            yield Path(path)

    def commit(self, version: int, made: Path) -> None:
        if version in self.versions():
            raise _taken(self.uri(version))
        for file in sorted(made.iterdir(), key=lambda file: file.name == MANIFEST_FILE):
            self.add(version, made, file.name)

    def add(self, version: int, made: Path, name: str) -> None:
        self._filesystem.put_file(str(made / name), self._path(version, name))

    def remove(self, version: int) -> None:
        # Without its description it is no version any more.
        self._filesystem.rm_file(self._path(version, MANIFEST_FILE))
        self._filesystem.rm(f"{self._root}/{directory_name(version)}", recursive=True)

    def _path(self, version: int, name: str) -> str:
        return f"{self._root}/{directory_name(version)}/{name}"


def _taken(uri: str) -> LocationError:
    return LocationError(f"{uri} exists already: versions are never overwritten; publish a greater one")
