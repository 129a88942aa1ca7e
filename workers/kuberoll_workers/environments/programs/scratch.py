"""Scratch directories of programs: their size while a program changes them, and their removal, whatever it left.

Descriptors of directories are used instead of paths: no link leads out, and no path is too long.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

MAX_DEPTH = 64
"""Depth beyond which a directory is not searched but counted as full."""


class Full(Exception):
    """A scratch directory has more files than the limit, or is too deep."""


def size(path: str, most_files: int) -> int:
    """Bytes on disk of a directory and everything in it.

    Raises:
        Full: It has more than so many entries, or is deeper than `MAX_DEPTH`.
    """
    with _opened(path) as root:
        return _size(root, most_files)


def remove(path: str) -> None:
    """Remove a directory and everything in it; nothing may be running in it anymore."""
    with contextlib.suppress(FileNotFoundError), _opened(path) as root:
        serial = 0
        while directories := _emptied(root):
            # What is deeper is moved up, one level at a time.
            for name in directories:
                with _opened(name, root) as directory:
                    for below in _emptied(directory):
                        _make_usable(below, directory)
                        serial += 1
                        os.rename(below, f".{serial}.removed", src_dir_fd=directory, dst_dir_fd=root)
                os.rmdir(name, dir_fd=root)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def _size(root: int, most_files: int) -> int:
    total, entries = 0, 0
    seen: set[int] = set()
    # Descriptors of directories to read, with their depth.
    waiting = [(os.dup(root), 0)]
    try:
        while waiting:
            directory, depth = waiting.pop()
            try:
                for entry in os.scandir(directory):
                    entries += 1
                    if entries > most_files or depth > MAX_DEPTH:
                        raise Full
                    # It may be gone, or be another meanwhile.
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if status.st_ino not in seen:
                            seen.add(status.st_ino)
                            total += status.st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append((_open(entry.name, directory), depth + 1))
            finally:
                os.close(directory)
    finally:
        for directory, _ in waiting:
            os.close(directory)
    return total


def _emptied(directory: int) -> list[str]:
    """Remove all but directories; returns the names of these."""
    left = []
    with os.scandir(directory) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            left.append(entry.name)
        else:
            os.unlink(entry.name, dir_fd=directory)
    return left


@contextlib.contextmanager
def _opened(name: str, parent: int | None = None) -> Iterator[int]:
    directory = _open(name, parent)
    try:
        yield directory
    finally:
        os.close(directory)


def _open(name: str, parent: int | None = None) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if parent is not None:
        with contextlib.suppress(PermissionError):
            found = os.open(name, flags, dir_fd=parent)
            if os.fstat(found).st_mode & 0o700 == 0o700:
                return found
            os.close(found)
        _make_usable(name, parent)
    return os.open(name, flags, dir_fd=parent)


def _make_usable(name: str, parent: int) -> None:
    """Give the owner all rights to a directory, which is not replaced by a link meanwhile."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)
