"""Scratch directories of runs, and the removal of those that a killed run and its killed watchdog left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Always /tmp, and short: HAProxy's socket, below a directory of 56 characters, may have 97 in all.
_PLACE = Path("/tmp")
_PREFIX = "kr-"
_OWNER = ".owner"


@contextmanager
def scratch_directory(place: Path = _PLACE) -> Iterator[Path]:
    """Create a directory, locked by this process while it is in use; remove those of runs that have ended.

    The watchdog removes it at the end. It contains the run's tokens, so it must not outlive both processes.
    """
    _sweep(place)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    owner = os.open(directory / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        yield directory
    finally:
        os.close(owner)


def _sweep(place: Path) -> None:
    for directory in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            owner = os.open(directory / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(owner)
