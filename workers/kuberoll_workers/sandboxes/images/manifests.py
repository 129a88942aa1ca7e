"""Manifests and configurations of images: what OCI's image specification and Docker's schema 2 say, as values."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kuberoll_workers.sandboxes.images.errors import DigestMismatch, ImageInvalid, PlatformMissing
from kuberoll_workers.sandboxes.images.references import is_digest

MAX_BYTES: Final = 8 << 20
"""Bytes of a manifest or a configuration at most; registries take 4 MiB."""

INDEXES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
"""Media types of lists: a manifest for each platform."""
MANIFESTS: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""Media types of manifests."""
ACCEPTED: Final = ", ".join((*INDEXES, *MANIFESTS))

_CONFIGS: Final = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
_LAYERS: Final = ("application/vnd.oci.image.layer.", "application/vnd.docker.image.rootfs.")
_OLD: Final = "application/vnd.docker.distribution.manifest.v1+"
_ARCHITECTURES: Final = {
    "x86_64": ("amd64", ""),
    "amd64": ("amd64", ""),
    "aarch64": ("arm64", "v8"),
    "arm64": ("arm64", "v8"),
    "armv6l": ("arm", "v6"),
    "armv7l": ("arm", "v7"),
    "i386": ("386", ""),
    "i686": ("386", ""),
    "loongarch64": ("loong64", ""),
}
_VARIANTS: Final = {"arm64": "v8", "arm": "v7"}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A content, by its digest."""

    digest: str
    size: int
    media_type: str = ""


@dataclass(frozen=True, slots=True)
class Platform:
    """What an image runs on, in Go's words: an architecture of Linux."""

    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        return f"linux/{self.architecture}" + (f"/{self.variant}" if self.variant else "")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest: its configuration, and its layers, lowest first."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What an image says about its programs, and the digests of its layers as plain tar, lowest first."""

    diff_ids: tuple[str, ...]
    user: str = ""
    environment: Mapping[str, str]
    workdir: str = "/"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def this_platform() -> Platform:
    """What this machine runs."""
    machine = platform.machine().lower()
    return Platform(*_ARCHITECTURES.get(machine, (machine, "")))


def digest_of(content: bytes, like: str = "sha256:") -> str:
    """The digest of a content, by the algorithm of another digest."""
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


def checked(content: bytes, digest: str, where: str) -> bytes:
    """The content, if it is the one that its digest names.

    Raises:
        DigestMismatch: It is not.
    """
    if (found := digest_of(content, digest)) != digest:
        raise DigestMismatch(f"{where}: the content has the digest {found}, and {digest} was asked for")
    return content


def is_index(content: bytes, media_type: str, where: str) -> bool:
    """True for a list of manifests, False for a manifest.

    Args:
        media_type: What a server says that it is; the content's own word counts more.

    Raises:
        ImageInvalid: It is neither.
    """
    value = _object(content, where)
    kind = str(value.get("mediaType") or media_type.partition(";")[0].strip())
    if kind.startswith(_OLD) or value.get("schemaVersion") == 1:
        raise ImageInvalid(f"{where}: a manifest of schema 1, which nobody writes since 2017: push the image again")
    if kind in INDEXES or (kind not in MANIFESTS and "manifests" in value):
        return True
    if kind in MANIFESTS or "layers" in value:
        return False
    raise ImageInvalid(f"{where}: {kind or 'it'} is no manifest of an image")


def parse_index(content: bytes, where: str) -> list[tuple[Descriptor, Mapping[str, Any]]]:
    """The entries of a list of manifests, each with all that the list says of it.

    Raises:
        ImageInvalid: It is none.
    """
    entries = _object(content, where).get("manifests")
    if not isinstance(entries, list):
        raise ImageInvalid(f"{where}: the list has no manifests")
    return [(_descriptor(entry, f"{where}: manifests[{i}]"), entry) for i, entry in enumerate(entries)]


def choose(entries: Sequence[tuple[Descriptor, Mapping[str, Any]]], wanted: Platform, where: str) -> Descriptor:
    """The manifest for a platform: of the same variant, else without one, else the first of the architecture.

    Raises:
        PlatformMissing: There is none.
    """
    found: list[tuple[int, Descriptor]] = []
    offered = []
    for descriptor, entry in entries:
        stated = entry.get("platform")
        stated = stated if isinstance(stated, dict) else {}
        system, architecture = stated.get("os", "linux"), stated.get("architecture", wanted.architecture)
        offered.append("/".join(str(word) for word in (system, architecture, stated.get("variant")) if word))
        if (system, architecture) == ("linux", wanted.architecture):
            variant = stated.get("variant") or _VARIANTS.get(str(architecture), "")
            found.append((0 if variant == (wanted.variant or variant) else 1, descriptor))
    if not found:
        # BuildKit lists attestations beside images, as unknown/unknown.
        words = ", ".join(name for name in offered if "unknown" not in name) or "none"
        raise PlatformMissing(f"{where}: no image for {wanted}; there are {words}: build it for {wanted}, too")
    return min(found, key=lambda item: item[0])[1]


def parse_manifest(content: bytes, where: str) -> Manifest:
    """A manifest.

    Raises:
        ImageInvalid: It is none of an image.
    """
    value = _object(content, where)
    config = _descriptor(value.get("config"), f"{where}: config")
    layers = value.get("layers")
    if not isinstance(layers, list):
        raise ImageInvalid(f"{where}: the manifest has no layers")
    found = tuple(_descriptor(layer, f"{where}: layers[{i}]") for i, layer in enumerate(layers))
    for kind in (config.media_type, *(layer.media_type for layer in found)):
        if kind and kind not in _CONFIGS and (not kind.startswith(_LAYERS) or "encrypted" in kind):
            raise ImageInvalid(f"{where}: {kind} is nothing that a machine can be made of: name an image")
    if config.size > MAX_BYTES:
        raise ImageInvalid(f"{where}: a configuration of {config.size} bytes; at most {MAX_BYTES} are read")
    return Manifest(config, found)


def parse_config(content: bytes, where: str, wanted: Platform) -> Config:
    """A configuration.

    Raises:
        ImageInvalid: It is none.
        PlatformMissing: Its programs do not run on the wanted platform.
    """
    value = _object(content, where)
    stated = str(value.get("os") or "linux"), str(value.get("architecture") or wanted.architecture)
    if stated != ("linux", wanted.architecture):
        raise PlatformMissing(f"{where}: its programs are for {'/'.join(stated)}, not {wanted}: build it for {wanted}")
    try:
        diff_ids = (value.get("rootfs") or {}).get("diff_ids") or []
        inner = value.get("config") or {}
        for digest in diff_ids:
            if not is_digest(digest):
                raise ImageInvalid(f"{where}: {digest!r:.100} is no digest of a layer")
        variables = (str(item).partition("=") for item in inner.get("Env") or [])
        return Config(
            diff_ids=tuple(diff_ids),
            user=str(inner.get("User") or ""),
            environment={name: text for name, equal, text in variables if equal},
            workdir=str(inner.get("WorkingDir") or "/"),
            entrypoint=_argv(inner.get("Entrypoint")),
            command=_argv(inner.get("Cmd")),
        )
    except (TypeError, AttributeError) as error:
        raise ImageInvalid(f"{where}: no configuration of an image: {error}") from error


def _argv(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.100} is no list of words")
    return tuple(str(word) for word in value)


def _object(content: bytes, where: str) -> dict[str, Any]:
    if len(content) > MAX_BYTES:
        raise ImageInvalid(f"{where}: more than {MAX_BYTES} bytes")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ImageInvalid(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ImageInvalid(f"{where}: no JSON object")
    return value


def _descriptor(value: Any, where: str) -> Descriptor:
    if not isinstance(value, dict):
        raise ImageInvalid(f"{where}: no descriptor")
    digest, size = value.get("digest"), value.get("size")
    if not isinstance(digest, str) or not is_digest(digest):
        raise ImageInvalid(f"{where}: {digest!r:.100} is no digest by SHA-256 or SHA-512")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ImageInvalid(f"{where}: {size!r:.100} is no size")
    return Descriptor(digest, size, str(value.get("mediaType") or ""))
