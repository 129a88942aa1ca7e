"""Layers, layouts and archives that tests make themselves."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kuberoll_workers.sandboxes.images.manifests import digest_of, this_platform

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FILE, DIRECTORY, SYMLINK, HARD_LINK, FIFO, DEVICE = (
    tarfile.REGTYPE,
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
)


def entry(
    name: str,
    kind: bytes = FILE,
    content: bytes = b"",
    *,
    link: str = "",
    mode: int | None = None,
    uid: int = 0,
    gid: int = 0,
    mtime: float = 1_700_000_000,
    pax: Mapping[str, str] | None = None,
) -> tuple[tarfile.TarInfo, bytes]:
    """A member of a tar."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(content)
    info.mode = mode if mode is not None else (0o755 if kind == DIRECTORY else 0o644)
    info.uid, info.gid, info.mtime = uid, gid, mtime
    info.pax_headers = dict(pax or {})
    return info, content


def tar(entries: Iterable[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    """A plain tar."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form, errors="surrogateescape") as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def compressed(plain: bytes, how: str) -> bytes:
    """A layer as registries have it."""
    if how == "gzip":
        return gzip.compress(plain, 1, mtime=0)
    return zstd.compress(plain) if how == "zstd" else plain


def config_of(plains: Sequence[bytes], **config: Any) -> bytes:
    """The configuration of an image of such layers."""
    return json.dumps(
        {
            "os": "linux",
            "architecture": this_platform().architecture,
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [digest_of(plain) for plain in plains]},
        }
    ).encode()


def write_layout(
    directory: Path, images: Mapping[str | None, Sequence[bytes]], how: str = "gzip", **config: Any
) -> Path:
    """Write an OCI layout.

    Args:
        images: The plain layers of each image, by its name.
    """
    entries = []
    for name, plains in images.items():
        layers = [
            _put(directory, compressed(plain, how), f"application/vnd.oci.image.layer.v1.tar{_suffix(how)}")
            for plain in plains
        ]
        text = config_of(plains, **config)
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _put(directory, text, "application/vnd.oci.image.config.v1+json"),
            "layers": layers,
        }
        one = _put(directory, json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
        if name is not None:
            one["annotations"] = {"org.opencontainers.image.ref.name": name}
        entries.append(one)
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    return directory


def write_archive(path: Path, plains: Sequence[bytes], names: Sequence[str] = (), **config: Any) -> Path:
    """Write what `docker save` writes."""
    members = [entry(f"{i}/layer.tar", FILE, plain) for i, plain in enumerate(plains)]
    manifest = [
        {"Config": "config.json", "RepoTags": list(names), "Layers": [f"{i}/layer.tar" for i in range(len(plains))]}
    ]
    members += [
        entry("config.json", FILE, config_of(plains, **config)),
        entry("manifest.json", FILE, json.dumps(manifest).encode()),
    ]
    path.write_bytes(tar(members))
    return path


def _put(directory: Path, content: bytes, media_type: str) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    path = directory / "blobs/sha256" / digest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def _suffix(how: str) -> str:
    return "" if how == "plain" else f"+{how}"
