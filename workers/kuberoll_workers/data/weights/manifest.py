"""The description of a published version, which is written after everything else of it.

A version is a directory:

    version-00000007/
        kuberoll-weights.json   this description
        changes.msgpack         changes since another version, if it was published as such
        model.safetensors       all tensors: an anchor; it may be added later
"""

from __future__ import annotations

from typing import Final

import msgspec

MANIFEST_FILE: Final = "kuberoll-weights.json"
CHANGES_FILE: Final = "changes.msgpack"
MODEL_FILE: Final = "model.safetensors"
_FORMAT = 1
_PREFIX = "version-"


class ManifestRefused(ValueError):
    """A description that cannot be read."""


class Base(msgspec.Struct, kw_only=True, frozen=True):
    """What changes are to be applied to.

    Attributes:
        directory: Name of the version's directory, beside this one.
        digest: See `tensors.digest_of`.
    """

    directory: str
    digest: str


class WeightsManifest(msgspec.Struct, kw_only=True, frozen=True):
    """Description of a version.

    Attributes:
        files: Sizes in bytes of the files that were written with it.
        digest: Of all tensors, see `tensors.digest_of`; None: not computed.
        base: What the changes are to be applied to; None: there are none, all tensors are here.
    """

    version: int
    files: dict[str, int]
    digest: str | None = None
    base: Base | None = None
    format: int = _FORMAT


def encode_manifest(manifest: WeightsManifest) -> bytes:
    """The file's content."""
    return msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"


def decode_manifest(data: bytes, *, where: str) -> WeightsManifest:
    """Read the file's content.

    Raises:
        ManifestRefused: It is not one, or of a newer KubeRoll.
    """
    try:
        manifest = msgspec.json.decode(data, type=WeightsManifest)
    except msgspec.MsgspecError as error:
        raise ManifestRefused(f"{where}: {error}") from error
    if manifest.format != _FORMAT:
        raise ManifestRefused(f"{where} has the format {manifest.format}; this KubeRoll reads {_FORMAT}: update it")
    names = [*manifest.files, *([] if manifest.base is None else [manifest.base.directory])]
    if wrong := [name for name in names if "/" in name or name in ("", ".", "..")]:
        raise ManifestRefused(f"{where} names {wrong[0]!r}, which is not a name in its directory")
    return manifest


def directory_name(version: int) -> str:
    """Name of a version's directory; names sort as versions do."""
    return f"{_PREFIX}{version:08d}"


def version_of_directory(name: str) -> int | None:
    """The version of a directory; None: it is not one of a version."""
    digits = name.removeprefix(_PREFIX)
    return int(digits) if name.startswith(_PREFIX) and digits.isdecimal() else None
