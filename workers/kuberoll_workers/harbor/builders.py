"""Programs that build images: their commands, and what of an image is there already."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

BUILDERS: Final = ("docker", "podman", "buildah")

BuilderName = Literal["docker", "podman", "buildah"]

_LOOK_SECONDS: Final = 60.0
_MOST_CHARACTERS: Final = 4000
_MOST_TAGS: Final = "1000000"
_REFERENCE: Final = "org.opencontainers.image.ref.name"


class BuildError(Exception):
    """An image cannot be built, or not be brought where it shall be; the message has the end of the program's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """A program that builds images from Dockerfiles.

    Attributes:
        options: Further arguments of its `build`.
    """

    name: BuilderName
    options: tuple[str, ...] = ()

    async def build(self, context: Path, reference: str, seconds: float) -> None:
        """Build the image of a directory's Dockerfile.

        Raises:
            BuildError: The build fails, or takes longer than `seconds`.
        """
        # Sources are mounted read-only or copied: nothing is written into the task.
        command = [self.name, "build", *self.options, "--file", str(context / "Dockerfile"), "--tag", reference]
        await _run([*command, str(context)], seconds)

    async def push(self, reference: str, seconds: float) -> None:
        """Push an image to its registry.

        Raises:
            BuildError: It fails.
        """
        await _run([self.name, "push", reference], seconds)

    async def write(self, reference: str, layout: Path, seconds: float) -> None:
        """Add an image to an OCI layout, under its whole reference.

        Raises:
            BuildError: It fails, or this builder writes none.
        """
        self.check_layout()
        layout.parent.mkdir(parents=True, exist_ok=True)
        await _run([self.name, "push", reference, f"oci:{layout}:{reference}"], seconds)

    def check_layout(self) -> None:
        """
        Raises:
            BuildError: This builder writes no OCI layouts.
        """
        if self.name == "docker":
            raise BuildError("docker adds nothing to an OCI layout: take --builder podman or buildah, or --push")

    async def has(self, reference: str) -> bool:
        """True if the image is in the builder's own store."""
        kind = ("inspect", "--type", "image") if self.name == "buildah" else ("image", "inspect")
        return await _succeeds([self.name, *kind, reference])

    async def has_pushed(self, reference: str) -> bool:
        """True if the image is in its registry; False also if it may be, and buildah has no skopeo to ask with."""
        if self.name == "docker":
            return await _succeeds(["docker", "manifest", "inspect", reference])
        if self.name == "podman":
            # Its other questions are about lists of images, or bring the whole image.
            return await _has_tag(reference)
        return shutil.which("skopeo") is not None and await _succeeds(
            ["skopeo", "inspect", "--raw", f"docker://{reference}"]
        )


def find_builder(name: BuilderName | None, options: Sequence[str]) -> Builder:
    """The builder of this name, or the first that is installed.

    Raises:
        BuildError: It is not installed.
    """
    names: Sequence[BuilderName] = BUILDERS if name is None else (name,)
    found = next((one for one in names if shutil.which(one) is not None), None)
    if found is None:
        raise BuildError(f"{' and '.join(names)} cannot be found: install one of {', '.join(BUILDERS)}")
    return Builder(name=found, options=tuple(options))


def has_written(layout: Path, reference: str) -> bool:
    """True if an OCI layout has the image, with its manifest."""
    try:
        index = json.loads((layout / "index.json").read_bytes())
        entries = [entry for entry in index["manifests"] if entry.get("annotations", {}).get(_REFERENCE) == reference]
        return any((layout / "blobs" / str(entry["digest"]).replace(":", "/")).is_file() for entry in entries)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


async def _succeeds(command: Sequence[str]) -> bool:
    try:
        await _run(command, _LOOK_SECONDS)
    except BuildError:
        return False
    return True


async def _has_tag(reference: str) -> bool:
    """Ask a registry with podman, which prints a line `NAME TAG` for each tag."""
    name, _, tag = reference.rpartition(":")
    try:
        said = await _run(["podman", "search", "--list-tags", "--limit", _MOST_TAGS, name], _LOOK_SECONDS)
    except BuildError:
        return False
    return any(line.split()[-1:] == [tag] for line in said.splitlines())


async def _run(command: Sequence[str], seconds: float) -> str:
    """Run a program to its end; what it has started ends with it, also when this is cancelled.

    Returns:
        What it has said.

    Raises:
        BuildError: It fails, or takes longer.
    """
    name = " ".join(command[:2])
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError as error:
        raise BuildError(f"{name} has not ended after {seconds:g} s (environment.build_timeout_sec)") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    words = said.decode(errors="replace")
    if process.returncode:
        end = words[-_MOST_CHARACTERS:].strip()
        raise BuildError(f"{name} has failed with exit code {process.returncode}:\n{end}")
    return words
