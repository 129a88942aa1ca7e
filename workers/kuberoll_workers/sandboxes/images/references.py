"""References of images: what a manifest, a row or a person writes to name one.

`NAME[:TAG][@DIGEST]` in a registry, `oci:DIRECTORY[:TAG]` in an OCI layout, `docker-archive:FILE[:NAME]` in what
`docker save` and `podman save` write, and `host:/` for the root of the host itself, without an image. The grammar of
names and their completion (`debian` is `docker.io/library/debian:latest`) are those of distribution's package
`reference`; the colons after `oci:` and `docker-archive:` are those of containers-transports(5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kuberoll_workers.sandboxes.images.errors import ReferenceInvalid

DOCKER_HUB: Final = "docker.io"
LATEST: Final = "latest"
HOST: Final = "host:/"
"""No image: the root of the host itself, as far as drivers show it."""

_LAYOUT, _ARCHIVE = "oci:", "docker-archive:"
_OTHER_TRANSPORTS: Final = ("docker-daemon", "oci-archive", "containers-storage")
_MAX_NAME: Final = 255

_LABEL = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?")
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RegistryReference:
    """An image in a registry.

    Attributes:
        host: The registry, with a port if one was given; `docker.io` for Docker Hub.
        tag: None only if there is a digest.
        digest: Digest of the manifest, or of the list of manifests.
    """

    host: str
    repository: str
    tag: str | None = LATEST
    digest: str | None = None

    def __str__(self) -> str:
        tag = "" if self.tag is None else f":{self.tag}"
        digest = "" if self.digest is None else f"@{self.digest}"
        return f"{self.host}/{self.repository}{tag}{digest}"


@dataclass(frozen=True, slots=True)
class LayoutReference:
    """An image in a directory with an OCI layout.

    Attributes:
        name: Its annotation `org.opencontainers.image.ref.name`; None: the only one there is.
    """

    directory: Path
    name: str | None = None

    def __str__(self) -> str:
        return f"{_LAYOUT}{self.directory}" + ("" if self.name is None else f":{self.name}")


@dataclass(frozen=True, slots=True)
class ArchiveReference:
    """An image in a file that `docker save` or `podman save` wrote.

    Attributes:
        name: Its name and tag, complete; None: the only one there is.
    """

    file: Path
    name: str | None = None

    def __str__(self) -> str:
        return f"{_ARCHIVE}{self.file}" + ("" if self.name is None else f":{self.name}")


@dataclass(frozen=True, slots=True)
class HostReference:
    """The host's own root."""

    def __str__(self) -> str:
        return HOST


Reference = RegistryReference | LayoutReference | ArchiveReference | HostReference


def parse(text: str) -> Reference:
    """What a text names. Paths are made absolute.

    Raises:
        ReferenceInvalid: It names no image; the message says how to mend it.
    """
    if not text or text != text.strip():
        raise ReferenceInvalid(f"image {text!r}: write a name such as debian:12, without spaces around it")
    if text == HOST:
        return HostReference()
    if text.startswith(HOST):
        raise ReferenceInvalid(f"image {text!r}: of the host only its own root can be a sandbox's: write {HOST!r}")
    if text.startswith(_LAYOUT):
        path, _, name = text.removeprefix(_LAYOUT).partition(":")
        return LayoutReference(_path(text, path, f"{_LAYOUT}DIRECTORY[:TAG]"), name or None)
    if text.startswith(_ARCHIVE):
        path, _, name = text.removeprefix(_ARCHIVE).partition(":")
        return ArchiveReference(_path(text, path, f"{_ARCHIVE}FILE[:NAME]"), complete(name) if name else None)
    return _named(text)


def complete(text: str) -> str:
    """The whole of a name in a registry: `debian` is `docker.io/library/debian:latest`.

    Raises:
        ReferenceInvalid: It is none.
    """
    return str(_named(text))


def is_digest(text: str) -> bool:
    """True for a digest that contents can be checked by: SHA-256 or SHA-512."""
    return _DIGEST.fullmatch(text) is not None


def _path(text: str, path: str, form: str) -> Path:
    if not path or "\0" in path:
        raise ReferenceInvalid(f"image {text!r}: a path is missing: {form}")
    return Path(path).absolute()


def _named(text: str) -> RegistryReference:
    scheme, colon, rest = text.partition(":")
    if colon and (rest.startswith("//") or scheme in _OTHER_TRANSPORTS):
        known = f"names in registries, {_LAYOUT}DIRECTORY[:TAG], {_ARCHIVE}FILE[:NAME] and {HOST}"
        mended = f": write {rest.lstrip('/')!r}" if rest.startswith("//") else ""
        raise ReferenceInvalid(f"image {text!r}: {scheme}: is not read here, but {known} are{mended}")
    rest, at, digest = text.partition("@")
    if at and not is_digest(digest):
        raise ReferenceInvalid(
            f"image {text!r}: {digest!r} is no digest: sha256: and 64 hexadecimal digits, lower case"
        )
    path, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag:
        path, tag = rest, ""
    elif not _TAG.fullmatch(tag):
        raise ReferenceInvalid(
            f"image {text!r}: {tag!r} is no tag: at most 128 letters, digits, '_', '.' and '-', not '.' or '-' first"
        )
    if _ID.fullmatch(path):
        raise ReferenceInvalid(f"image {text!r}: an id names no image of a registry: write NAME@sha256:DIGEST")
    host, repository = _split(path)
    if not _HOST.fullmatch(host):
        raise ReferenceInvalid(f"image {text!r}: {host!r} is no registry: HOST or HOST:PORT, without a scheme")
    for part in repository.split("/"):
        if not _PART.fullmatch(part):
            lower = f": write {part.lower()!r}" if _PART.fullmatch(part.lower()) else ""
            raise ReferenceInvalid(
                f"image {text!r}: {part!r} is no part of a name: lower-case letters, digits, and single '.', '_', '-' "
                f"between them{lower}"
            )
    if len(host) + 1 + len(repository) > _MAX_NAME:
        raise ReferenceInvalid(f"image {text[:40]!r}…: a name has at most {_MAX_NAME} characters")
    return RegistryReference(host, repository, tag or (None if digest else LATEST), digest or None)


def _split(path: str) -> tuple[str, str]:
    first, slash, rest = path.partition("/")
    if not slash or not (set(".:") & set(first) or first == "localhost" or first != first.lower()):
        host, repository = DOCKER_HUB, path
    else:
        host, repository = first, rest
    if host == f"index.{DOCKER_HUB}":
        host = DOCKER_HUB
    if host == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    return host, repository
