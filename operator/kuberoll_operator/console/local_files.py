"""Local directory of a copy: existing files, partial files, and the record of earlier copies.

A file is written as `NAME.partial` and renamed when it is complete and on disk. A record beside the files lists the
copies that were made while the run went on: unless somebody has changed them, newer ones may replace them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, Final

RECORD: Final = ".kuberoll-get.json"

_PARTIAL: Final = ".partial"
_CHUNK_BYTES: Final = 1 << 20


class Action(Enum):
    """Action on a file."""

    SKIP = "skip"
    """The local file is equal to the remote one."""
    CONTINUE = "continue"
    """The local file is the beginning of the remote one."""
    FETCH = "fetch"
    """There is no local file, or it may be replaced."""
    REFUSE = "refuse"
    """The local file is a different one."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Size and digest of a local file.

    Attributes:
        sha256: SHA-256 as hexadecimal digits.
    """

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """Entry of the record: a file that an earlier copy wrote.

    Attributes:
        snapshot: True if the run was still going on when it was copied.
    """

    size: int
    sha256: str
    snapshot: bool


def decide(size: int, local: Contents | None, *, begins: bool, copied: CopyRecord | None, force: bool) -> Action:
    """Decide what to do with one file.

    Args:
        size: Size of the remote file.
        local: The local file; None if it does not exist.
        begins: True if the remote file begins with the local content.
        copied: The record's entry for this name and run.
        force: True if different files may be overwritten.
    """
    if local is None:
        return Action.FETCH
    if begins:
        return Action.SKIP if local.size == size else Action.CONTINUE
    unchanged = copied is not None and (copied.size, copied.sha256) == (local.size, local.sha256)
    if force or (copied is not None and copied.snapshot and unchanged):
        return Action.FETCH
    return Action.REFUSE


def contents_of(path: Path) -> Contents | None:
    """Size and digest of a file; None if it does not exist."""
    try:
        with path.open("rb") as file:
            digest, size = hashlib.sha256(), 0
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except FileNotFoundError:
        return None
    return Contents(size, digest.hexdigest())


class Directory:
    """The directory that is copied into.

    Args:
        run: Identity of the run; a record of another run is ignored.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self._run = run
        self._copied = _read_record(path / RECORD, run)

    def copied(self, name: str) -> CopyRecord | None:
        """The record's entry for a name; None if there is none."""
        return self._copied.get(name)

    def partial(self, name: str) -> Path:
        """Path of the partial file for a name."""
        return self.path / f"{name}{_PARTIAL}"

    def open_partial(self, name: str, begin: Path | None) -> BinaryIO:
        """The partial file, opened for appending.

        Args:
            begin: File with its initial content, which may be itself; None to start empty.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.partial(name)
        if begin is not None and begin != path:
            shutil.copyfile(begin, path)
        return path.open("wb" if begin is None else "ab")

    def complete(self, name: str, file: BinaryIO, contents: Contents, *, snapshot: bool) -> None:
        """Rename a complete partial file, durably."""
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self.partial(name).replace(self.path / name)
        self.record(name, contents, snapshot=snapshot)

    def record(self, name: str, contents: Contents, *, snapshot: bool) -> None:
        """Record that a file was copied."""
        entry = CopyRecord(contents.size, contents.sha256, snapshot)
        if self._copied.get(name) == entry:
            return
        self._copied[name] = entry
        files = {key: asdict(value) for key, value in sorted(self._copied.items())}
        text = json.dumps({"run": self._run, "files": files}, indent=1)
        written = self.path / f"{RECORD}{_PARTIAL}"
        written.write_text(text + "\n")
        written.replace(self.path / RECORD)


def _read_record(path: Path, run: str) -> dict[str, CopyRecord]:
    # Without a readable record, files are merely not replaced without --force.
    try:
        found: Mapping[str, Any] = json.loads(path.read_text())
        if found["run"] != run:
            return {}
        return {name: CopyRecord(**entry) for name, entry in found["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
