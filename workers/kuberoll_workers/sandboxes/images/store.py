"""A directory with images: each layer unpacked once, whole or not at all, and shared by the images that have it.

A store's directory has one for each map of ids (`IdMap`), since the owners of files are those of the map:

images/NAME.json       what a reference named when it was fetched last, and which layers that takes
layers/KEY/            a layer that is whole; KEY.json: what it is. Machines that use it hold this file
layers/KEY.new/        a layer while it is unpacked, or what an attempt that was killed left
layers/KEY.old/        a layer while it is removed
blobs/                 layers as a registry has them, until they are unpacked
locks/                 who fetches an image, who unpacks a layer

Names are short, so that a mount takes many of them.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from kuberoll_workers.data.model_cache.locks import alone, hold
from kuberoll_workers.sandboxes.images.archives import ArchiveSource
from kuberoll_workers.sandboxes.images.credentials import credentials_for
from kuberoll_workers.sandboxes.images.downloads import RegistrySource
from kuberoll_workers.sandboxes.images.errors import (
    ImageError,
    ImageRefused,
    ImageUnavailable,
    NoSpace,
    RegistryUnreachable,
)
from kuberoll_workers.sandboxes.images.layers import Limits, Unpacked
from kuberoll_workers.sandboxes.images.layouts import LayoutSource
from kuberoll_workers.sandboxes.images.locks import exclusive
from kuberoll_workers.sandboxes.images.references import (
    ArchiveReference,
    HostReference,
    LayoutReference,
    Reference,
    parse,
)
from kuberoll_workers.sandboxes.images.registry import Patience, Registry
from kuberoll_workers.sandboxes.images.sources import Found, Source, StoredLayer
from kuberoll_workers.sandboxes.images.unpacker import Unpacker
from kuberoll_workers.sandboxes.users import IdMap

_log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 900.0
"""Seconds in which a machine begins with an image that was found for it; until then it is not removed."""

_FORMAT: Final = 1
_DOWNLOADS: Final = 3
_EMPTY_TAR: Final = bytes(1024)
_EMPTY_DIFF_ID: Final = f"sha256:{hashlib.sha256(_EMPTY_TAR).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that is unpacked.

    Attributes:
        reference: What named it, complete.
        digest: Of its manifest; of its configuration, if it comes from an archive.
        layers: Directories, lowest first; at least one. Nobody may change what is in them.
        user: `USER[:GROUP]`, names or numbers; empty: root.
        size: Bytes of all files in its layers.
    """

    reference: str
    digest: str
    layers: tuple[Path, ...]
    user: str
    environment: Mapping[str, str]
    workdir: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    size: int


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What a store has, in bytes.

    Attributes:
        images: Number of references.
        layers: Number of unpacked layers.
        unpacked: Bytes of their files.
        downloaded: Bytes of layers that are not unpacked yet.
    """

    images: int
    layers: int
    unpacked: int
    downloaded: int


class Hold:
    """Keeps the layers of an image, until it is closed or its process ends."""

    def __init__(self, files: Sequence[IO[bytes]]) -> None:
        self._files = list(files)

    def close(self) -> None:
        """Let them go."""
        while self._files:
            self._files.pop().close()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ImageStore:
    """Images in a directory, for machines with the same ids; for any number of threads and processes."""

    def __init__(
        self,
        directory: Path,
        ids: IdMap,
        *,
        limits: Limits | None = None,
        patience: Patience | None = None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """
        Args:
            directory: Made if it is missing. Whoever mounts layers as a machine's root that is another user than this
                one (`ids.outside(0)`) must be able to pass through it and those above, or be in it already.
            limits: What a layer may take.
            patience: How long registries are tried.
            grace: Seconds in which an image that was asked for is not removed.
        """
        self._ids = ids
        self._limits = limits or Limits()
        self._patience = patience
        self._grace = grace
        self._root = directory.absolute() / f"ids-{_key(ids.text())[:8]}"
        self._images, self._layers, self._blobs, self._locks = (
            self._root / name for name in ("images", "layers", "blobs", "locks")
        )
        self._prepared = False

    def image(self, reference: str, *, refresh: bool = False) -> Image:
        """An image, fetched and unpacked unless it is there. Blocks: give it a thread.

        Args:
            refresh: Ask a registry whether the tag names another image now; otherwise what is there is taken, as long
                as it is. Layouts and archives are looked at each time.

        Raises:
            ReferenceInvalid: The text names no image.
            ImageRefused: It is not there, may not be had, or cannot be unpacked.
            ImageUnavailable: A registry does not answer, or the disk is full.
            UserNamespacesUnavailable: Nothing can be unpacked here.
        """
        named = parse(reference)
        with self._prepare():
            source = self._source(named)
            record = self._images / f"{_key(str(named))}.json"
            if not refresh and (found := self._there(record, source.state())) is not None:
                return found
            with exclusive(self._locks / f"image-{record.name[:2]}"):
                # Somebody else may have fetched it meanwhile.
                if not refresh and (found := self._there(record, source.state())) is not None:
                    return found
                try:
                    return self._fetch(str(named), source, record)
                except RegistryUnreachable as error:
                    raise RegistryUnreachable(f"{error}; and the image is not in {self._root}") from error
                finally:
                    source.close()

    def hold(self, image: Image) -> Hold:
        """Keep the layers of an image from being removed, for as long as a machine uses them.

        Raises:
            ImageUnavailable: They were removed since.
        """
        files: list[IO[bytes]] = []
        for path in image.layers:
            if (file := hold(path.with_name(f"{path.name}.json"))) is not None:
                files.append(file)
            if file is None or not path.is_dir():
                Hold(files).close()
                raise ImageUnavailable(f"image {image.reference}: it was removed from the store: ask for it again")
        return Hold(files)

    def remove_unused(self, keep: Collection[str] = ()) -> int:
        """Remove images that nobody uses: neither asked for lately, nor held, nor to be kept; the bytes of their files.

        Args:
            keep: References of images that stay.

        Raises:
            ReferenceInvalid: A text names no image.
        """
        kept = {str(parse(text)) for text in keep}
        freed = 0
        with self._prepare(), exclusive(self._locks / "removal"), self._unpacker() as unpacker:
            used: set[str] = set()
            for path in self._images.glob("*.json"):
                record = _read(path)
                if record is not None and (record["reference"] in kept or not self._forget(path)):
                    used.update(record["layers"])
            for path in self._layers.iterdir():
                key, _, kind = path.name.partition(".")
                if kind == "json" and key not in used:
                    freed += self._remove(key, unpacker)
                elif kind in ("new", "old"):
                    with exclusive(self._lock_of(key)):
                        self._clear(path, unpacker)
            for path in self._blobs.iterdir():
                if path.name.startswith("lock-"):
                    continue
                with exclusive(self._blobs / f"lock-{path.name.removesuffix('.part')[-3:]}"):
                    freed += self._remove_blob(path)
        return freed

    def disk_use(self) -> DiskUse:
        """What the store has, by what was counted when it was unpacked."""
        with self._prepare():
            layers = [layer for path in self._layers.glob("*.json") if (layer := _read(path)) is not None]
            blobs = 0
            for path in self._blobs.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    blobs += path.stat().st_blocks * 512
            return DiskUse(
                sum(1 for _ in self._images.glob("*.json")),
                len(layers),
                sum(layer["size"] for layer in layers),
                blobs,
            )

    @contextmanager
    def _prepare(self) -> Iterator[None]:
        try:
            if not self._prepared:
                self._make_directories()
                self._prepared = True
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpace(f"{self._root}: {error.strerror}: free some space, or give another directory") from error
            raise ImageUnavailable(
                f"{error.filename or self._root}: {error.strerror}: user {os.geteuid()} must be able to write there"
            ) from error

    def _make_directories(self) -> None:
        # Programs with set-user-id bits are in there: nobody else is to come near them, but the root of machines, who
        # mounts them.
        shifted = self._shifted
        for path in (self._root.parent, self._root, self._images, self._layers, self._blobs, self._locks):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in (self._root, self._layers):
            if shifted:
                os.chown(path, -1, self._ids.outside_group(0))
            path.chmod(0o710 if shifted else 0o700)
        if shifted and not self._root.parent.stat().st_mode & 0o011:
            self._root.parent.chmod(0o711)

    def _source(self, reference: Reference) -> Source:
        if isinstance(reference, LayoutReference):
            return LayoutSource(reference)
        if isinstance(reference, ArchiveReference):
            return ArchiveSource(reference)
        if isinstance(reference, HostReference):
            raise ImageRefused(f"{reference} is no image, but the root of a host: there is nothing to fetch")
        host = reference.host
        registry = Registry(
            host, reference.repository, credentials=lambda: credentials_for(host), patience=self._patience
        )
        return RegistrySource(reference, registry, self._blobs)

    def _unpacker(self) -> Unpacker:
        return Unpacker(self._ids, self._layers, self._limits)

    # What is there.

    def _there(self, path: Path, state: str | None) -> Image | None:
        """An image that was fetched, with all its layers; None: it is not there, or is another one now."""
        # Who wants to remove it has it alone.
        if (held := hold(path)) is None:
            return None
        with held:
            record = _read(path)
            if record is None or record["state"] != state:
                return None
            layers = tuple(self._layers / key for key in record["layers"])
            if not all(layer.is_dir() for layer in layers):
                return None
            os.utime(path)
        config = record["config"]
        return Image(
            reference=record["reference"],
            digest=record["digest"],
            layers=layers,
            user=config["user"],
            environment=config["environment"],
            workdir=config["workdir"],
            entrypoint=tuple(config["entrypoint"]),
            command=tuple(config["command"]),
            size=record["size"],
        )

    # Fetching.

    def _fetch(self, reference: str, source: Source, path: Path) -> Image:
        began = time.monotonic()
        state = source.state()
        found = source.find()
        # What is there stays, however long it takes to download the rest.
        with ExitStack() as held:
            keys = self._obtain(reference, source, found, held)
            self._record(path, reference, state, found, keys)
        _log.info("image %s is there: %d layers, %.1f s", reference, len(keys), time.monotonic() - began)
        if (image := self._there(path, state)) is None:
            raise ImageUnavailable(f"image {reference}: it was removed while it was fetched: ask for it again")
        return image

    def _record(self, path: Path, reference: str, state: str | None, found: Found, keys: Sequence[str]) -> None:
        # The same layer twice is the upper one, and overlayfs takes none twice.
        keys = list(reversed(dict.fromkeys(reversed(keys))))
        sizes = [layer["size"] for key in keys if (layer := _read(self._layers / f"{key}.json")) is not None]
        config = dataclasses.asdict(found.config)
        del config["diff_ids"]
        record = {
            "format": _FORMAT,
            "reference": reference,
            "state": state,
            "digest": found.digest,
            "config": config,
            "layers": keys,
            "size": sum(sizes),
        }
        _write(path, record)

    def _obtain(self, reference: str, source: Source, found: Found, held: ExitStack) -> list[str]:
        """Keys of all layers, lowest first, which are unpacked then, and held."""
        layers = list(zip(found.config.diff_ids, found.layers, strict=True)) or [(_EMPTY_DIFF_ID, "")]
        missing = dict.fromkeys(name for i, (_, name) in enumerate(layers) if self._key_of(layers[: i + 1]) is None)
        keys: list[str] = []
        with ThreadPoolExecutor(_DOWNLOADS, "layers") as pool, self._unpacker() as unpacker:
            # Those below are unpacked while those above are downloaded.
            begun = {name: pool.submit(source.prepare, name) for name in missing if name}
            try:
                for i, (_, name) in enumerate(layers):
                    if name in begun:
                        begun[name].result()
                    keys.append(self._unpack(source, layers[: i + 1], keys, unpacker, held))
                    if name in begun:
                        source.discard(name)
            except ImageError as error:
                raise type(error)(f"image {reference}: layer {len(keys) + 1} of {len(layers)}: {error}") from error
            finally:
                source.close()
                pool.shutdown(wait=False, cancel_futures=True)
        return keys

    def _key_of(self, layers: Sequence[tuple[str, str]]) -> str | None:
        """Key of the last of some layers, which lie upon each other; None: it is not unpacked."""
        for key in _keys([diff_id for diff_id, _ in layers]):
            if (self._layers / key).is_dir():
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self._layers / f"{key}.json")
                    return key
        return None

    def _unpack(
        self,
        source: Source,
        layers: Sequence[tuple[str, str]],
        lowers: Sequence[str],
        unpacker: Unpacker,
        held: ExitStack,
    ) -> str:
        diff_id, name = layers[-1]
        plain, chained = _keys([diff_id for diff_id, _ in layers])
        with exclusive(self._lock_of(plain)) as lock:
            if (key := self._key_of(layers)) is not None and self._holds(key, held):
                return key
            fresh = self._layers / f"{plain}.new"
            self._clear(fresh, unpacker)
            fresh.mkdir(mode=0o700)
            try:
                self._hand_over(fresh)
                began = time.monotonic()
                with source.layer(name) if name else _in_memory(_EMPTY_TAR) as stored:
                    made = unpacker.unpack(stored, diff_id, fresh.name, lowers=lowers, lock=lock)
                _tell(diff_id, made, time.monotonic() - began)
                # Whiteouts, and directories that the archive does not have, are made for the layers below.
                key = chained if made.implied or made.whiteouts else plain
                _write(
                    self._layers / f"{key}.json", {"format": _FORMAT, "diff_id": diff_id, **dataclasses.asdict(made)}
                )
                fresh.rename(self._layers / key)
                _sync(self._layers)
                self._holds(key, held)
            except BaseException:
                with contextlib.suppress(ImageError, OSError):
                    self._clear(fresh, unpacker)
                raise
            return key

    def _holds(self, key: str, held: ExitStack) -> bool:
        if (file := hold(self._layers / f"{key}.json")) is None:
            return False
        held.enter_context(file)
        return True

    def _hand_over(self, path: Path) -> None:
        """Give a directory to the root of machines, whom the process is that fills and empties it."""
        if self._shifted:
            os.chown(path, self._ids.outside(0), self._ids.outside_group(0))

    @property
    def _shifted(self) -> bool:
        return self._ids.outside(0) != os.geteuid()

    def _lock_of(self, key: str) -> Path:
        return self._locks / f"layer-{key[:2]}"

    # Removing.

    def _forget(self, path: Path) -> bool:
        """Remove what a reference named, unless it was asked for lately."""
        with alone(path) as free:
            if not free or time.time() - path.stat().st_mtime < self._grace:
                return False
            path.unlink()
            return True

    def _remove(self, key: str, unpacker: Unpacker) -> int:
        """Remove a layer that no image has, unless a machine does, or it is of an image that is being fetched."""
        path, about = self._layers / key, self._layers / f"{key}.json"
        with exclusive(self._lock_of(key)), alone(about) as free:
            if not free or time.time() - about.stat().st_mtime < self._grace:
                return 0
            size = (_read(about) or {}).get("size", 0)
            old = self._layers / f"{key}.old"
            self._clear(old, unpacker)
            with contextlib.suppress(FileNotFoundError):
                path.rename(old)
            about.unlink()
        self._clear(old, unpacker)
        return int(size)

    def _remove_blob(self, path: Path) -> int:
        try:
            found = path.stat()
            if time.time() - found.st_mtime < self._grace:
                return 0
            path.unlink()
        except FileNotFoundError:
            return 0
        return found.st_blocks * 512

    def _clear(self, path: Path, unpacker: Unpacker) -> None:
        if path.is_dir():
            self._hand_over(path)
            unpacker.empty(path.name)
            path.rmdir()


def _keys(diff_ids: Sequence[str]) -> tuple[str, str]:
    """Names of the last of some layers: by itself, and upon these others."""
    return _key(diff_ids[-1]), _key(f"upon others: {' '.join(diff_ids)}")


def _key(text: str) -> str:
    """A short name: 130 bits of a digest."""
    return base64.b32encode(hashlib.sha256(text.encode()).digest()).decode().lower()[:26]


@contextmanager
def _in_memory(content: bytes) -> Iterator[StoredLayer]:
    descriptor = os.memfd_create("layer")
    try:
        os.write(descriptor, content)
        yield StoredLayer(descriptor, 0, len(content))
    finally:
        os.close(descriptor)


def _tell(diff_id: str, made: Unpacked, seconds: float) -> None:
    _log.info("layer %s is unpacked: %d entries, %d bytes, %.1f s", diff_id, made.entries, made.size, seconds)
    if made.strangers or made.dropped:
        _log.warning(
            "layer %s: %d entries are of users or groups that machines do not have here, and %d extended attributes "
            "could not be kept",
            *(diff_id, made.strangers, made.dropped),
        )


def _read(path: Path) -> dict[str, Any] | None:
    """What is written in a file; None: it is not there, or of another format."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == _FORMAT else None


def _write(path: Path, value: Mapping[str, Any]) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    with fresh.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
