"""Weights that were published as changes, made whole again on this machine.

A version that was published as changes names its base. The nearest version that is whole is taken, a copy of this
machine or an anchor, and the changes since are applied to a copy of it. What comes out has the digest that the version
was published with, or is not used.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kuberoll_workers.data.weights.manifest import (
    CHANGES_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    ManifestRefused,
    WeightsManifest,
    decode_manifest,
)
from kuberoll_workers.serving.engines.interface import WeightsRefused

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_PREFIX = "restored-"
# Publishers write an anchor far more often.
_LONGEST_CHAIN = 1000


class LinkBroken(Exception):
    """A version cannot be made of its base: one of the two is missing or damaged."""


@dataclass(frozen=True, slots=True)
class Source:
    """A directory of weights, on this machine or elsewhere.

    Attributes:
        filesystem: None: this machine's.
        root: Path in the file system.
        uri: For messages.
    """

    filesystem: AbstractFileSystem | None
    root: str
    uri: str

    def read(self, name: str) -> bytes | None:
        """Content of a file; None: there is none."""
        try:
            if self.filesystem is None:
                return (Path(self.root) / name).read_bytes()
            return bytes(self.filesystem.cat_file(f"{self.root}/{name}"))
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        """True if there is such a file."""
        if self.filesystem is None:
            return (Path(self.root) / name).is_file()
        self.filesystem.invalidate_cache()
        return bool(self.filesystem.isfile(f"{self.root}/{name}"))

    def copy(self, name: str, target: Path) -> None:
        """Copy a file."""
        if self.filesystem is None:
            shutil.copyfile(Path(self.root) / name, target)
        else:
            self.filesystem.get_file(f"{self.root}/{name}", str(target))

    def beside(self, directory: str) -> Source:
        """Another directory in the same one."""
        return Source(
            self.filesystem, f"{self.root.rpartition('/')[0]}/{directory}", f"{self.uri.rpartition('/')[0]}/{directory}"
        )

    def manifest(self) -> WeightsManifest | None:
        """The description of what was published there; None: there is none.

        Raises:
            WeightsRefused: It cannot be read.
        """
        try:
            data = self.read(MANIFEST_FILE)
            return None if data is None else decode_manifest(data, where=f"{self.uri}/{MANIFEST_FILE}")
        except ManifestRefused as error:
            raise WeightsRefused(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Link:
    source: Source
    manifest: WeightsManifest


def restore(source: Source, manifest: WeightsManifest, place: Path) -> Path:
    """Return a directory with the whole weights of a version that was published as changes.

    Args:
        place: Directory of this machine's copies, which the caller has locked.

    Raises:
        WeightsRefused: They cannot be made; the message says what is missing or damaged.
    """
    assert manifest.digest is not None
    if (there := whole_copy(manifest.digest, place)) is not None:
        return there
    try:
        return _restored(source, manifest, place, cached=True)
    except LinkBroken as error:
        why = str(error)
    # This machine's copy may be the damaged one; without it the nearest anchor is read, which may be this version's.
    try:
        return _restored(source, manifest, place, cached=False)
    except LinkBroken as error:
        more = "" if str(error) == why else f"; {error}"
        raise WeightsRefused(f"{source.uri}: {why}{more}") from error


def whole_copy(digest: str, place: Path) -> Path | None:
    """This machine's copy of the weights with a digest; None: there is none, or it is damaged, and was removed."""
    from kuberoll_workers.data.weights.tensors import UnusableWeights, digest_of, read_directory

    path = copy_of(digest, place)
    if not path.is_dir():
        return None
    # It is not synced when it is made: the machine may have lost its power since.
    with contextlib.suppress(UnusableWeights):
        if digest_of(read_directory(path)) == digest:
            return path
    shutil.rmtree(path, ignore_errors=True)
    return None


def check_sizes(path: Path, manifest: WeightsManifest) -> None:
    """Check that files are as long as when they were published.

    Raises:
        WeightsRefused: One is not.
    """
    for name, size in manifest.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise WeightsRefused(f"{path / name}: {error.strerror}; was it written completely?") from error
        if found != size:
            raise WeightsRefused(f"{path / name} has {found} bytes of {size}; was it written completely?")


def copy_of(digest: str, place: Path) -> Path:
    """Directory of this machine's copy of the weights with a digest."""
    return place / f"{_PREFIX}{digest}"


def _restored(source: Source, manifest: WeightsManifest, place: Path, *, cached: bool) -> Path:
    from kuberoll_workers.data.weights.changes import ChangesRefused, apply_changes, decode_changes
    from kuberoll_workers.data.weights.tensors import UnusableWeights, digest_of, read_file

    start, links = _chain(source, manifest, place, cached=cached)
    part = place / f"{_PREFIX}part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    file = part / MODEL_FILE
    try:
        if isinstance(start, Path):
            shutil.copyfile(start / MODEL_FILE, file)
        else:
            start.source.copy(MODEL_FILE, file)
        tensors = read_file(file, writable=True)
        if not isinstance(start, Path) and links and digest_of(tensors) != start.manifest.digest:
            raise LinkBroken(f"{start.source.uri}/{MODEL_FILE} is damaged: it has not the digest of its version")
        for link in links:
            data = link.source.read(CHANGES_FILE)
            if data is None or len(data) != link.manifest.files.get(CHANGES_FILE):
                raise LinkBroken(f"{link.source.uri}/{CHANGES_FILE} is missing or not complete")
            apply_changes(decode_changes(data, where=f"{link.source.uri}/{CHANGES_FILE}"), tensors)
        if digest_of(tensors) != manifest.digest:
            raise LinkBroken(f"what was made of {len(links)} changes has not the digest of version {manifest.version}")
        del tensors
        assert manifest.digest is not None
        target = copy_of(manifest.digest, place)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    except (ChangesRefused, UnusableWeights) as error:
        raise LinkBroken(str(error)) from error
    except (LinkBroken, WeightsRefused):
        raise
    except Exception as error:
        # Every object store's library raises its own exceptions.
        raise LinkBroken(f"{type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _chain(
    source: Source, manifest: WeightsManifest, place: Path, *, cached: bool
) -> tuple[Path | _Link, Sequence[_Link]]:
    """What is whole, and the changes to apply to it, in order.

    Args:
        cached: Begin with a copy of this machine, if there is one.

    Raises:
        LinkBroken: A version is missing.
    """
    links: list[_Link] = []
    while True:
        base = manifest.base
        if base is not None and cached and copy_of(base.digest, place).is_dir():
            return copy_of(base.digest, place), [_Link(source, manifest), *links]
        if source.has(MODEL_FILE):
            return _Link(source, manifest), links
        if base is None:
            raise LinkBroken(f"{source.uri} has no {MODEL_FILE}")
        links.insert(0, _Link(source, manifest))
        if len(links) > _LONGEST_CHAIN:
            raise LinkBroken(f"more than {_LONGEST_CHAIN} versions back there is none that is whole")
        before = source.beside(base.directory)
        found = before.manifest()
        if found is None or found.digest != base.digest:
            what = "is not there" if found is None else "is another one"
            raise LinkBroken(f"the base of version {manifest.version}, {before.uri}, {what}")
        source, manifest = before, found
