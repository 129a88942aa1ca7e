"""Images of an engine: pulled by it from a registry, or loaded into it from a layout or an archive, once."""

from __future__ import annotations

import json
import logging
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.images.archives import ArchiveSource
from kuberoll_workers.sandboxes.images.errors import ImageError
from kuberoll_workers.sandboxes.images.layouts import LayoutSource
from kuberoll_workers.sandboxes.images.manifests import this_platform
from kuberoll_workers.sandboxes.images.references import (
    ArchiveReference,
    HostReference,
    LayoutReference,
    RegistryReference,
    parse,
)
from kuberoll_workers.sandboxes.images.sources import Found, Source

LOADED: Final = "localhost/kuberoll/sandbox"
"""Name, in the engine, of images that were loaded; their tags are digests."""

HOST_REFUSED: Final = (
    "the task has no image, and containers of Docker or Podman are made of one: give it one (docker_image, or "
    "sandbox.image of the job), or play it with the programs of this machine: KUBEROLL_SANDBOX_DRIVER=namespaces"
)
"""Why an engine makes no sandbox of the host's root."""

_CHUNK_BYTES: Final = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineImage:
    """An image that the engine has.

    Attributes:
        id: What the engine knows it by.
        environment: Variables of its programs.
        user: Whom they run as; empty: root.
        workdir: Where they run.
        checks_health: True if it says how its health is checked.
    """

    id: str
    environment: Mapping[str, str]
    user: str
    workdir: str
    checks_health: bool


def obtain(client: Any, image: str) -> EngineImage:
    """Have an engine hold an image.

    Args:
        client: The SDK's client of the engine.

    Raises:
        SandboxUnavailable: It cannot be had.
    """
    import docker

    try:
        reference = parse(image)
        if isinstance(reference, RegistryReference):
            return _pulled(client, reference)
        if isinstance(reference, HostReference):
            raise SandboxUnavailable(HOST_REFUSED)
        return _loaded(client, reference)
    except ImageError as error:
        raise SandboxUnavailable(str(error)) from error
    except (docker.errors.DockerException, OSError) as error:
        raise SandboxUnavailable(f"image {image}: {error}") from error


def describe(found: Mapping[str, Any], name: str) -> EngineImage:
    """What an image is by its engine's words (`GET /images/NAME/json`)."""
    config = found.get("Config") or {}
    wanted = this_platform().architecture
    if (architecture := str(found.get("Architecture") or wanted)) != wanted:
        _log.warning(
            "image %s is for %s, and this machine is %s: its programs may not start", name, architecture, wanted
        )
    variables = (str(item).partition("=") for item in config.get("Env") or ())
    return EngineImage(
        id=str(found["Id"]),
        environment={variable: text for variable, equal, text in variables if equal},
        user=str(config.get("User") or ""),
        workdir=str(config.get("WorkingDir") or "/"),
        checks_health=bool(config.get("Healthcheck")),
    )


def archive_of(source: Source, found: Found, name: str) -> Iterator[bytes]:
    """An image as a file of `docker save`, which all engines load.

    Layers may be compressed in it. The configuration has what a sandbox needs: neither checks of health, nor volumes.

    Args:
        name: Name and tag that it gets in the engine.
    """
    config = json.dumps(
        {
            "architecture": this_platform().architecture,
            "os": "linux",
            "config": {
                "User": found.config.user,
                "Env": [f"{variable}={text}" for variable, text in found.config.environment.items()],
                "WorkingDir": found.config.workdir,
                "Entrypoint": list(found.config.entrypoint) or None,
                "Cmd": list(found.config.command) or None,
            },
            "rootfs": {"type": "layers", "diff_ids": list(found.config.diff_ids)},
        }
    ).encode()
    places = {layer: f"layer-{number}.tar" for number, layer in enumerate(dict.fromkeys(found.layers))}
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": [places[layer] for layer in found.layers]}]
    for member, content in (("manifest.json", json.dumps(manifest).encode()), ("config.json", config)):
        yield from (_header(member, len(content)), content, _padding(len(content)))
    for layer, member in places.items():
        with source.layer(layer) as stored:
            yield _header(member, stored.length)
            for start in range(0, stored.length, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, stored.length - start)
                yield os.pread(stored.descriptor, size, stored.offset + start)
            yield _padding(stored.length)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _loaded(client: Any, reference: ArchiveReference | LayoutReference) -> EngineImage:
    source = ArchiveSource(reference) if isinstance(reference, ArchiveReference) else LayoutSource(reference)
    found = source.find()
    name = f"{LOADED}:{found.digest.partition(':')[2][:128]}"
    if (there := _inspected(client, name)) is not None:
        return there
    errors = [line["error"] for line in client.load_image(archive_of(source, found, name)) if "error" in line]
    if errors:
        raise SandboxUnavailable(f"image {reference}: the engine does not load it: {errors[-1]}")
    if (there := _inspected(client, name)) is None:
        raise SandboxUnavailable(f"image {reference}: the engine has loaded it, and does not have it")
    return there


def _pulled(client: Any, reference: RegistryReference) -> EngineImage:
    import docker

    name = _name(reference)
    if (there := _inspected(client, name)) is not None:
        return there
    said = ""
    try:
        place, tag = f"{reference.host}/{reference.repository}", reference.digest or reference.tag
        for line in client.pull(place, tag, stream=True, decode=True):
            said = str(line.get("error") or said)
    except docker.errors.APIError as error:
        said = str(error.explanation or error)
    if said:
        raise SandboxUnavailable(
            f"image {name}: the engine cannot pull it: {said.strip()}; check the name, and log in to its registry "
            "(docker login, podman login)"
        )
    if (there := _inspected(client, name)) is None:
        raise SandboxUnavailable(f"image {name}: the engine has pulled it, and does not have it")
    return there


def _inspected(client: Any, name: str) -> EngineImage | None:
    import docker

    try:
        return describe(client.inspect_image(name), name)
    except docker.errors.NotFound:
        return None


def _name(reference: RegistryReference) -> str:
    """Its name for the engine, where a digest stands alone."""
    place = f"{reference.host}/{reference.repository}"
    return f"{place}@{reference.digest}" if reference.digest else f"{place}:{reference.tag}"


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)
