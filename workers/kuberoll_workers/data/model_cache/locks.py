"""Locks of files that processes of several containers, and of several machines if their storage has locks, share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_log = logging.getLogger(__name__)

_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@contextmanager
def locked(path: Path, waits: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold a lock file, which stays; the kernel frees the lock of a process that dies.

    Args:
        waits: Called before another holder is waited for.

    Yields:
        False if the storage has no locks: others may do the same at the same time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            if not _try(file, fcntl.LOCK_EX):
                if waits is not None:
                    waits()
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            _log.warning("%s: the storage has no locks (%s): pods may fetch the same model at once", path, error)
            yield False
        else:
            yield True


def is_locked(path: Path) -> bool:
    """True if a process holds a lock file, or if that is unknown."""
    try:
        with path.open("r+b") as file:
            return not _try(file, fcntl.LOCK_EX)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def hold(path: Path) -> IO[bytes] | None:
    """Hold a file that is there, beside others who hold it, for as long as what is returned is open.

    Reading it is enough, also where it is mounted read-only.

    Returns:
        None if it is not there any more.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)
    if not _is_at(file, path):
        file.close()
        return None
    return file


@contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Hold a file that nobody else holds.

    Yields:
        False if somebody does, if it is gone, or if the storage has no locks.
    """
    try:
        # NFS locks for writing only what is open for writing.
        file = path.open("r+b")
    except OSError:
        yield False
        return
    with file:
        got = False
        with contextlib.suppress(OSError):
            got = _try(file, fcntl.LOCK_EX) and _is_at(file, path)
        yield got


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _try(file: IO[bytes] | IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
