"""What an agent leaves for tests in a machine of their own."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import itertools
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from kuberoll_workers.sandboxes.handle import Sandbox

ARTIFACTS: Final = "/logs/artifacts"
_TREE_BYTES: Final = 256 << 20


async def collect(sandbox: Sandbox, artifacts: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """Archives of the directory of artifacts and of those that a step names (`harbor.rows`, STEP), by their paths.

    What is not there is left out, and so are links out of a directory, which cannot come along: the tests miss it if
    they need it.
    """
    found = {}
    for artifact in [{"source": ARTIFACTS}, *artifacts]:
        with contextlib.suppress(FileNotFoundError):
            archive = await sandbox.pack(artifact["source"], size=_TREE_BYTES, user="0")
            found[artifact["source"]] = without(archive, artifact.get("exclude", ()))
    return found


async def place(sandbox: Sandbox, archives: Mapping[str, bytes]) -> None:
    """Put what was collected into another sandbox, at the same paths."""
    for path, archive in archives.items():
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as given:
            members = given.getmembers()
            file = given.extractfile(members[0]) if len(members) == 1 and members[0].isfile() else None
            if file is not None:
                await sandbox.write(path, file.read(), mode=members[0].mode & 0o777, user="0")
                continue
        await sandbox.unpack(archive, path, user="0")


def without(archive: bytes, patterns: Sequence[str]) -> bytes:
    """An archive of a directory without links out of it, and what patterns name, with `tar --exclude`'s rules.

    That of a file is as it is.
    """
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as given:
        members = given.getmembers()
        kept = [one for one in members if _stays(one) and not (patterns and _is_excluded(one.name, patterns))]
        if len(kept) == len(members):
            return archive
        found = io.BytesIO()
        with tarfile.open(fileobj=found, mode="w", format=tarfile.PAX_FORMAT) as to:
            for member in kept:
                to.addfile(member, given.extractfile(member) if member.isfile() else None)
    return found.getvalue()


def _stays(member: tarfile.TarInfo) -> bool:
    """False for a link that may lead out of the directory, and for what is no file, directory or link."""
    if not member.issym():
        return member.isfile() or member.isdir() or member.islnk()
    target = PurePosixPath(member.linkname).parts
    up = len(list(itertools.takewhile(lambda part: part == "..", target)))
    # A name after which it goes up again may be a link itself.
    return (
        not member.linkname.startswith("/") and ".." not in target[up:] and up < len(PurePosixPath(member.name).parts)
    )


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    """True if a pattern is like the end of the name, or of a directory above it, after a `/` or from the beginning."""
    parts = PurePosixPath(name).parts
    paths = {"/".join(parts[begin:end]) for end in range(1, len(parts) + 1) for begin in range(end)}
    return any(fnmatch.fnmatchcase(path, pattern) for path in paths for pattern in patterns)
