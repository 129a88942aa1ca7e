"""Images in registries, as sources of a store: layers are downloaded into files, and kept until they are unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kuberoll_workers.sandboxes.images.errors import ImageInvalid
from kuberoll_workers.sandboxes.images.locks import exclusive
from kuberoll_workers.sandboxes.images.manifests import (
    Descriptor,
    choose,
    is_index,
    parse_config,
    parse_index,
    parse_manifest,
    this_platform,
)
from kuberoll_workers.sandboxes.images.references import LATEST, RegistryReference
from kuberoll_workers.sandboxes.images.registry import Registry
from kuberoll_workers.sandboxes.images.sources import Found, StoredLayer, part_of, sized


class RegistrySource:
    """An image in a registry."""

    def __init__(self, reference: RegistryReference, registry: Registry, blobs: Path) -> None:
        """
        Args:
            blobs: Directory for what is downloaded, which may be shared with other processes.
        """
        self._reference = reference
        self._registry = registry
        self._blobs = blobs
        self._where = f"image {reference}"
        self._layers: dict[str, Descriptor] = {}

    def state(self) -> str | None:
        """Nothing that is known without asking."""
        return None

    def find(self) -> Found:
        """What the registry has by this name for this platform."""
        content, one = self._registry.manifest(self._reference.digest or self._reference.tag or LATEST)
        if is_index(content, one.media_type, self._where):
            chosen = choose(parse_index(content, self._where), this_platform(), self._where)
            content, one = self._registry.manifest(chosen.digest)
            if is_index(content, one.media_type, self._where):
                raise ImageInvalid(f"{self._where}: lists of manifests within lists")
        manifest = parse_manifest(content, self._where)
        config = parse_config(self._registry.small(manifest.config), self._where, this_platform())
        self._layers = {layer.digest: layer for layer in manifest.layers}
        return sized(Found(one.digest, config, tuple(layer.digest for layer in manifest.layers)), self._where)

    def prepare(self, name: str) -> None:
        """Download a layer, unless it is there."""
        path = self._path(name)
        with exclusive(self._blobs / f"lock-{name[-3:]}"):
            if not path.exists():
                part = path.with_name(f"{path.name}.part")
                self._registry.blob(self._layers[name], part)
                part.rename(path)

    @contextmanager
    def layer(self, name: str) -> Iterator[StoredLayer]:
        """A layer, by its digest."""
        with ExitStack() as opened:
            while True:
                self.prepare(name)
                # Whoever has unpacked the same one may have removed it at this moment; what is open stays.
                with suppress(FileNotFoundError):
                    layer = opened.enter_context(part_of(self._path(name), 0, None, None))
                    break
            yield layer

    def discard(self, name: str) -> None:
        """Remove what was downloaded of a layer."""
        self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """End what is being downloaded."""
        self._registry.stop()

    def _path(self, name: str) -> Path:
        return self._blobs / name.replace(":", "-")
