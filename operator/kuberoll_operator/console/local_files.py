"""A directory that output is copied into: what is there already, what may be written, and what earlier copies left.

A file grows under `NAME.partial` and takes its name when it is complete and on disk. Beside the files lies a record of
what was copied while the run went on: those copies, as long as nobody has changed them, may be replaced by newer ones.
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
    """What becomes of a file."""

    SKIP = "skip"
    """It is here as it is there."""
    CONTINUE = "continue"
    """What is here is the beginning of what is there."""
    FETCH = "fetch"
    """It is not here, or may be replaced."""
    REFUSE = "refuse"
    """Another file is here."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a local file holds.

    Attributes:
        sha256: In hexadecimal digits.
    """

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Copied:
    """What an earlier copy wrote.

    Attributes:
        snapshot: The run went on while it was copied.
    """

    size: int
    sha256: str
    snapshot: bool


def decide(size: int, here: Contents | None, *, begins: bool, copied: Copied | None, force: bool) -> Action:
    """What becomes of one file.

    Args:
        size: Of the file there.
        here: The file here.
        begins: Whether the file there begins with what is here.
        copied: What an earlier copy of the same run wrote under this name.
        force: Whether other files may be replaced.
    """
    if here is None:
        return Action.FETCH
    if begins:
        return Action.SKIP if here.size == size else Action.CONTINUE
    unchanged = copied is not None and (copied.size, copied.sha256) == (here.size, here.sha256)
    if force or (copied is not None and copied.snapshot and unchanged):
        return Action.FETCH
    return Action.REFUSE


def contents_of(path: Path) -> Contents | None:
    """What a file holds; None where there is none."""
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
    """The directory.

    Args:
        run: What tells the run from others; a record of another run counts for nothing.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self._run = run
        self._copied = _read_record(path / RECORD, run)

    def copied(self, name: str) -> Copied | None:
        """What an earlier copy of this run wrote under a name."""
        return self._copied.get(name)

    def partial(self, name: str) -> Path:
        """Where a file grows."""
        return self.path / f"{name}{_PARTIAL}"

    def open_partial(self, name: str, begin: Path | None) -> BinaryIO:
        """A growing file, opened to add to it.

        Args:
            begin: The file that it begins with, itself or another; None: it begins empty.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.partial(name)
        if begin is not None and begin != path:
            shutil.copyfile(begin, path)
        return path.open("wb" if begin is None else "ab")

    def complete(self, name: str, file: BinaryIO, contents: Contents, *, snapshot: bool) -> None:
        """Give a grown file its name, durably."""
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self.partial(name).replace(self.path / name)
        self.record(name, contents, snapshot=snapshot)

    def record(self, name: str, contents: Contents, *, snapshot: bool) -> None:
        """Remember that a file was copied."""
        entry = Copied(contents.size, contents.sha256, snapshot)
        if self._copied.get(name) == entry:
            return
        self._copied[name] = entry
        files = {key: asdict(value) for key, value in sorted(self._copied.items())}
        text = json.dumps({"run": self._run, "files": files}, indent=1)
        written = self.path / f"{RECORD}{_PARTIAL}"
        written.write_text(text + "\n")
        written.replace(self.path / RECORD)


def _read_record(path: Path, run: str) -> dict[str, Copied]:
    # A record that cannot be read only means that files are not replaced without being asked.
    try:
        found: Mapping[str, Any] = json.loads(path.read_text())
        if found["run"] != run:
            return {}
        return {name: Copied(**entry) for name, entry in found["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
