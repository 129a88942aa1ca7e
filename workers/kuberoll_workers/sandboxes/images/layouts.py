"""Images in a directory with an OCI layout, as `skopeo copy`, `buildah push` and `docker buildx --output` write it."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from pathlib import Path

from kuberoll_workers.sandboxes.images.errors import ImageInvalid, ImageNotFound
from kuberoll_workers.sandboxes.images.manifests import (
    Descriptor,
    checked,
    choose,
    is_index,
    parse_config,
    parse_index,
    parse_manifest,
    this_platform,
)
from kuberoll_workers.sandboxes.images.references import LayoutReference, is_digest
from kuberoll_workers.sandboxes.images.sources import Found, LocalSource, StoredLayer, part_of, read_small, sized

_NAME = "org.opencontainers.image.ref.name"
_NESTED = 4


class LayoutSource(LocalSource):
    """An image in an OCI layout."""

    def __init__(self, reference: LayoutReference) -> None:
        self._reference = reference
        self._where = f"image {reference}"

    def state(self) -> str | None:
        """The digest of the layout's index."""
        return hashlib.sha256(self._index()).hexdigest()

    def find(self) -> Found:
        """What the layout has by this name."""
        entries = parse_index(self._index(), self._where)
        wanted = self._reference.name
        named = [(one, entry) for one, entry in entries if wanted in (None, self._name(entry), one.digest)]
        if not named:
            names = sorted(filter(None, (self._name(entry) for _, entry in entries)))
            raise ImageNotFound(
                f"{self._where}: there is none of this name, but {', '.join(names) or 'none with names'}"
            )
        if len({self._name(entry) for _, entry in named}) > 1:
            names = [self._name(entry) or one.digest for one, entry in named]
            raise ImageNotFound(f"{self._where}: there are several: name one, as in oci:DIRECTORY:{names[0]}: {names}")
        chosen = choose(named, this_platform(), self._where)
        for _ in range(_NESTED):
            content = self._blob(chosen)
            if not is_index(content, chosen.media_type, self._where):
                break
            chosen = choose(parse_index(content, self._where), this_platform(), self._where)
        else:
            raise ImageInvalid(f"{self._where}: lists of manifests within lists")
        manifest = parse_manifest(content, self._where)
        config = parse_config(self._blob(manifest.config), self._where, this_platform())
        return sized(Found(chosen.digest, config, tuple(layer.digest for layer in manifest.layers)), self._where)

    def layer(self, name: str) -> AbstractContextManager[StoredLayer]:
        """A layer, by its digest."""
        return part_of(self._path(name), 0, None, name)

    def _index(self) -> bytes:
        path = self._reference.directory / "index.json"
        try:
            return read_small(path, self._where)
        except (FileNotFoundError, NotADirectoryError) as error:
            if self._reference.directory.is_file():
                hint = "it is a file: unpack it (tar -xf) into a directory, or name it docker-archive:FILE"
            else:
                hint = (
                    "`skopeo copy docker://NAME oci:DIRECTORY:TAG` and `buildah push NAME oci:DIRECTORY:TAG` write one"
                )
            raise ImageNotFound(f"{self._where}: no OCI layout is there ({path} is missing); {hint}") from error

    def _blob(self, descriptor: Descriptor) -> bytes:
        try:
            content = read_small(self._path(descriptor.digest), self._where)
        except FileNotFoundError as error:
            raise ImageInvalid(f"{self._where}: the layout lacks {descriptor.digest}: copy the image again") from error
        return checked(content, descriptor.digest, self._where)

    def _path(self, digest: str) -> Path:
        assert is_digest(digest)
        return self._reference.directory / "blobs" / Path(*digest.split(":"))

    @staticmethod
    def _name(entry: object) -> str | None:
        annotations = entry.get("annotations") if isinstance(entry, dict) else None
        name = annotations.get(_NAME) if isinstance(annotations, dict) else None
        return name if isinstance(name, str) else None
