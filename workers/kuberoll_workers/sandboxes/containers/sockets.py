"""The sockets of servers inside containers, where nobody inside can change them.

A server makes its socket in a directory that it shares with this machine, before anything else runs in its container.
From there the socket is moved to a directory that only this user can open, and the shared one is removed: whoever is
root in a container can then neither put a server of his own in its place, nor write to this machine's disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from kuberoll_workers.data.lifetime import RUN_SCRATCH_VARIABLE
from kuberoll_workers.sandboxes.errors import SandboxUnavailable

INSIDE: Final = "/.kuberoll-socket"
"""Where the shared directory is in a container."""
NAME: Final = "s"
"""The socket's name in it."""

_PREFIX: Final = "kuberoll-containers-"
_LOCK: Final = "lock"
_LOCK_SECONDS: Final = 60.0
# `unix(7)`: 108 bytes with the last one, 0; names have up to 40, and what mkdtemp adds is 8.
_MOST_BYTES: Final = 100
_LONGEST: Final = len(f"/{_PREFIX}12345678//{NAME}.d/") + 40


class Sockets:
    """The directory of one driver's sockets.

    Attributes:
        directory: The directory.
    """

    def __init__(self, base: Path) -> None:
        """Make it.

        Args:
            base: Directory that it comes into.
        """
        self.directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def share(self, name: str) -> Path:
        """Make the directory that a sandbox's server makes its socket in."""
        shared = self._shared(name)
        shared.mkdir()
        # Root in a container may be anybody outside; nobody else gets here.
        shared.chmod(0o777)
        return shared

    def path(self, name: str) -> Path:
        """Where a sandbox's socket is in the end."""
        return self.directory / name

    def take(self, name: str) -> None:
        """Move the socket of a server that listens out of its container.

        Raises:
            OSError: It is not there.
        """
        shared = self._shared(name)
        (shared / NAME).rename(self.path(name))
        # Nothing can be made any more in what the container sees of it.
        shared.rmdir()

    def drop(self, name: str) -> None:
        """Remove all that there is of a sandbox."""
        self.path(name).unlink(missing_ok=True)
        shutil.rmtree(self._shared(name), ignore_errors=True)

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)

    def _shared(self, name: str) -> Path:
        return self.directory / f"{name}.d"


def bases(variables: Mapping[str, str]) -> Iterator[Path]:
    """Directories that sockets may come into, the best first.

    Args:
        variables: The environment.
    """
    for name in (RUN_SCRATCH_VARIABLE, "XDG_RUNTIME_DIR", "TMPDIR"):
        if place := variables.get(name):
            yield Path(place)
    yield Path("/tmp")


def base_of(variables: Mapping[str, str]) -> Path:
    """The first directory of those that is there, may be written to, and is no longer than addresses of sockets are.

    Raises:
        SandboxUnavailable: None is.
    """
    for place in bases(variables):
        if len(os.fsencode(place)) + _LONGEST <= _MOST_BYTES and place.is_dir() and os.access(place, os.W_OK | os.X_OK):
            return place
    raise SandboxUnavailable(
        f"no directory for sockets: set TMPDIR to one of your own with at most {_MOST_BYTES - _LONGEST} characters"
    )


def remove_leftovers(base: Path) -> None:
    """Remove directories of drivers that were killed."""
    for directory in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if not (directory / _LOCK).exists() and time.time() - directory.stat().st_mtime < _LOCK_SECONDS:
                # Just made, and not locked yet.
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(lock)
