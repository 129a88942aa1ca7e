"""Downloads of remote weights to this machine, once for all its replicas."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kuberoll_workers.data.extras import unusable_store
from kuberoll_workers.data.weights.manifest import WeightsManifest
from kuberoll_workers.serving.engines.interface import WeightsRefused
from kuberoll_workers.serving.engines.restoring import Source, check_sizes, copy_of, restore, whole_copy

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_KEPT = 2
_TENSORS = ".safetensors"
_OTHERS = (".bin", ".pt", ".pth")
_DESCRIPTIONS = ".json"


def fetch(uri: str, version: str, scratch: Path | None = None) -> Path:
    """Return a directory with the weights: the given one, or a copy on this machine.

    Copies are of URIs, and of weights that were published as changes, which are made whole. A copy appears only when
    it is complete, and only the newest two are kept.

    Args:
        version: Another version of the same URI is downloaded separately.
        scratch: Directory of the copies, the same for all processes of a machine; None: in the temporary directory.

    Raises:
        WeightsRefused: There are no weights, or they cannot be read.
    """
    try:
        return _fetch(uri, version, scratch)
    except WeightsRefused:
        raise
    except Exception as error:
        # Every object store's library raises its own exceptions. Nothing has been loaded yet.
        raise WeightsRefused(f"{uri} cannot be read: {type(error).__name__}: {error}") from error


def is_remote(uri: str) -> bool:
    """True if it is not a path on this machine."""
    return "://" in uri and not uri.startswith("file://")


def wanted_files(names: list[str]) -> list[str]:
    """Select the files of a saved model that an engine reads, without a trainer's other files, which may be larger."""
    tensors = [name for name in names if name.endswith(_TENSORS)]
    weights = tensors or [name for name in names if name.endswith(_OTHERS)]
    return weights and [*weights, *(name for name in names if name.endswith(_DESCRIPTIONS))]


def _fetch(uri: str, version: str, scratch: Path | None) -> Path:
    source = _source(uri)
    manifest = source.manifest()
    if source.filesystem is None and (manifest is None or manifest.base is None):
        path = Path(source.root)
        _check(path, manifest)
        return path
    from filelock import FileLock

    place = scratch if scratch is not None else Path(tempfile.gettempdir()) / "kuberoll-weights"
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / ".lock"):
        if manifest is not None and manifest.base is not None and manifest.digest is not None:
            target = restore(source, manifest, place)
        else:
            digest = None if manifest is None else manifest.digest
            name = hashlib.sha256(f"{uri}\n{version}".encode()).hexdigest()[:16]
            # The changes that come next are found a base by its digest.
            target = place / name if digest is None else copy_of(digest, place)
            if digest is not None:
                whole_copy(digest, place)
            if not target.is_dir():
                part = place / f"{name}.part"
                shutil.rmtree(part, ignore_errors=True)
                _copy(uri, part)
                _check(part, manifest)
                part.rename(target)
        target.touch()
        _remove_all_but(_KEPT, place)
    return target


def _source(uri: str) -> Source:
    if is_remote(uri):
        filesystem, root = _filesystem(uri)
        return Source(filesystem, root, uri.rstrip("/"))
    path = Path(uri.removeprefix("file://"))
    if not path.is_dir():
        raise WeightsRefused(f"{uri} is not a directory on this machine; mount it in the generation pods")
    return Source(None, str(path), str(path))


def _check(path: Path, manifest: WeightsManifest | None) -> None:
    """Check that files are those that were published.

    Raises:
        WeightsRefused: They are not.
    """
    if manifest is None:
        return
    check_sizes(path, manifest)
    if manifest.digest is not None:
        from kuberoll_workers.data.weights.tensors import UnusableWeights, digest_of, read_directory

        try:
            found = digest_of(read_directory(path))
        except UnusableWeights as error:
            raise WeightsRefused(str(error)) from error
        if found != manifest.digest:
            raise WeightsRefused(f"{path} is damaged: it has not the digest of version {manifest.version}")


def _copy(uri: str, part: Path) -> None:
    filesystem, root = _filesystem(uri)
    # The directory may have been listed when it was empty.
    filesystem.invalidate_cache()
    entries = [entry for entry in filesystem.ls(root, detail=True) if entry["type"] == "file"]
    files = wanted_files(sorted(str(entry["name"]) for entry in entries))
    if not files:
        raise WeightsRefused(f"{uri} has no weights (*{_TENSORS}); give the directory of a saved model")
    part.mkdir(parents=True)
    filesystem.get(files, [str(part / name.rpartition("/")[2]) for name in files])


def _filesystem(uri: str) -> tuple[AbstractFileSystem, str]:
    from fsspec.core import url_to_fs

    try:
        found: tuple[Any, str] = url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise WeightsRefused(f"{uri}: {unusable_store(uri, error)}") from error
    return found[0], found[1].rstrip("/")


def _remove_all_but(count: int, place: Path) -> None:
    copies = sorted((entry for entry in place.iterdir() if entry.is_dir()), key=lambda entry: entry.stat().st_mtime)
    for old in copies[:-count]:
        shutil.rmtree(old, ignore_errors=True)
