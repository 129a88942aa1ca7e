"""Where images come from: what a source says of an image, and how it gives its layers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kuberoll_workers.sandboxes.images.errors import ImageInvalid
from kuberoll_workers.sandboxes.images.manifests import Config

_SMALL: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """An image as its source has it.

    Attributes:
        digest: Of the manifest for this platform; of the configuration in archives, which have no other.
        layers: What the source knows each layer by, lowest first; as many as the configuration has.
    """

    digest: str
    config: Config
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer as it is stored: a part of an open file.

    Attributes:
        digest: What the part must have; None: it was checked before.
    """

    descriptor: int
    offset: int
    length: int
    digest: str | None = None


class Source(Protocol):
    """Has one image."""

    def state(self) -> str | None:
        """A word that is another one when the image may be; None: only asking tells, which takes a network."""

    def find(self) -> Found:
        """What it is.

        Raises:
            ImageError: It is not there, cannot be read, or is none.
        """

    def prepare(self, name: str) -> None:
        """Get a layer from afar, for `layer` later; by any thread."""

    def layer(self, name: str) -> AbstractContextManager[StoredLayer]:
        """A layer, by what `find` said, as long as the context lasts."""

    def discard(self, name: str) -> None:
        """A layer is not needed any more."""

    def close(self) -> None:
        """End what other threads get from it."""


def sized(found: Found, where: str) -> Found:
    """The same, if each layer has its digest as plain tar.

    Raises:
        ImageInvalid: It has more or fewer.
    """
    if len(found.layers) != len(found.config.diff_ids):
        raise ImageInvalid(
            f"{where}: {len(found.layers)} layers, and the configuration knows {len(found.config.diff_ids)}"
        )
    return found


def read_small(path: Path, where: str) -> bytes:
    """The content of a file that is no layer.

    Raises:
        ImageInvalid: It is too large for one.
    """
    with path.open("rb") as file:
        content = file.read(_SMALL + 1)
    if len(content) > _SMALL:
        raise ImageInvalid(f"{where}: {path.name} has more than {_SMALL} bytes")
    return content


class LocalSource:
    """What sources have in common whose layers are here."""

    def prepare(self, name: str) -> None:
        """It is here."""

    def discard(self, name: str) -> None:
        """It stays here."""

    def close(self) -> None:
        """Nothing is on its way."""


@contextmanager
def part_of(path: Path, offset: int, length: int | None, digest: str | None) -> Iterator[StoredLayer]:
    """A part of a file, open as long as the context lasts."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size - offset if length is None else length
        yield StoredLayer(descriptor, offset, size, digest)
    finally:
        os.close(descriptor)
