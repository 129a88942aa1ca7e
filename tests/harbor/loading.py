"""Images of layouts for an engine of containers, with what Harbor's runtime needs in each: bash, tar and /tmp."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tests.harbor.kinds import with_libraries


def load(layout: Path, name: str) -> None:
    """Load the image of a layout into Docker, under a name.

    Raises:
        Impossible: This machine has no bash, or no tar.
        CalledProcessError: Docker does not take it.
    """
    manifest = _read(layout, json.loads((layout / "index.json").read_text())["manifests"][0])
    configuration = _read(layout, manifest["config"])
    added = _added_layer()
    configuration["rootfs"]["diff_ids"].append(f"sha256:{hashlib.sha256(added).hexdigest()}")
    layers = [str(_path(layer)) for layer in manifest["layers"]]
    described = [{"Config": "config.json", "RepoTags": [name], "Layers": [*layers, "added.tar"]}]
    with subprocess.Popen(["docker", "load", "--quiet"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        with tarfile.open(fileobj=process.stdin, mode="w|") as archive:
            for layer in layers:
                archive.add(layout / layer, layer)
            _add(archive, "added.tar", added)
            _add(archive, "config.json", json.dumps(configuration).encode())
            _add(archive, "manifest.json", json.dumps(described).encode())
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)


def _added_layer() -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        place = tarfile.TarInfo("tmp")
        place.type, place.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(place)
        # Busybox's tar leaves nothing out, which Harbor wants of it for artifacts.
        for name, content in {**with_libraries("bash", "bin/bash"), **with_libraries("tar", "bin/tar")}.items():
            _add(archive, name, content, mode=0o755)
    return written.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes, *, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    archive.addfile(member, io.BytesIO(content))


def _read(layout: Path, descriptor: dict[str, Any]) -> Any:
    return json.loads((layout / _path(descriptor)).read_text())


def _path(descriptor: dict[str, Any]) -> Path:
    algorithm, _, digest = descriptor["digest"].partition(":")
    return Path("blobs", algorithm, digest)
