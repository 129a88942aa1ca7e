"""Unix sockets that have a path, as this machine has them.

The right to connect to one is the right to write to its file; neither a read-only mount nor Landlock before its version
9 takes it away. What the file system shows in place of a socket does.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

_MOST_ENTRIES = 10_000


def listening() -> Iterator[str]:
    """Paths of the sockets that processes have bound, and of those that are mounted here from elsewhere."""
    found = []
    try:
        with open("/proc/net/unix", "rb") as sockets:
            for line in sockets.read().splitlines()[1:]:
                # Seven fields, and the path, which may contain spaces; abstract names begin with @.
                fields = line.split(None, 7)
                if len(fields) == 8 and fields[7].startswith(b"/"):
                    found.append(fields[7])
        with open("/proc/self/mountinfo", "rb") as mounts:
            # Spaces and the like are written in octal.
            found += (
                re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line.split(b" ")[4])
                for line in mounts.read().splitlines()
            )
    except OSError:
        pass
    for path in dict.fromkeys(map(os.fsdecode, found)):
        try:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                yield os.path.realpath(path)
        except (OSError, ValueError):
            continue


def without_sockets(directory: str) -> list[str] | None:
    """The largest parts of a directory in which there is no socket; None if it has none at all.

    What cannot be listed may have some.
    """
    left = [_MOST_ENTRIES]
    parts = _parts(directory, left)
    return None if parts == [directory] else parts


def _parts(directory: str, left: list[int]) -> list[str]:
    kept: list[str] = []
    whole = True
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                left[0] -= 1
                if left[0] < 0:
                    return kept
                if entry.is_dir(follow_symlinks=False):
                    parts = _parts(entry.path, left)
                    whole &= parts == [entry.path]
                    kept.extend(parts)
                elif stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    whole = False
                else:
                    kept.append(entry.path)
    except OSError:
        return []
    return [directory] if whole and left[0] >= 0 else kept
