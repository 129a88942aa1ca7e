"""A view of the file system in which only some directories can be changed, made of mount and user namespaces.

Landlock does not cover modes, owners, times and extended attributes of files; on a read-only mount the kernel refuses
to change them, too. `mount_namespaces(7)`, `user_namespaces(7)` and `mount_setattr(2)` have the rules.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_BIND, _RECURSIVE, _SLAVE = 1 << 12, 1 << 14, 1 << 19
_MOUNT_SETATTR = 442
_AT_FDCWD = -100
# `struct mount_attr`: attributes to set, to clear, propagation, file descriptor of a user namespace.
_READ_ONLY = struct.pack("=QQQQ", 1, 0, 0, 0)
# They have no files of users; processes write to some of them about themselves.
_PSEUDO = frozenset(
    (
        "proc",
        "sysfs",
        "devpts",
        "cgroup",
        "cgroup2",
        "mqueue",
        "securityfs",
        "debugfs",
        "tracefs",
        "bpf",
        "binfmt_misc",
        "nsfs",
    )
)


def enter_read_only_view(writable: Iterable[str]) -> bool:
    """Make all files of this process, and of all that it starts, read-only but those in some directories.

    Irrevocable once capabilities are dropped. The process must have a single thread.

    Args:
        writable: Real paths of directories, or files, that stay as they are.

    Returns:
        False, with all files as before, if the system does not let this process have namespaces: on other systems than
        Linux 5.12, in containers without privileges, where unprivileged user namespaces are switched off.
    """
    if sys.platform != "linux":
        return False
    user, group = os.getuid(), os.getgid()
    # A mount namespace alone is for privileged users; then owners of files are seen as they are.
    if not _unshared(_NEW_MOUNTS):
        if not (os.access("/proc/self/uid_map", os.W_OK) and _unshared(_NEW_USER | _NEW_MOUNTS)):
            return False
        _map_own_ids(user, group)
    try:
        # What is unmounted outside later is unmounted here, too, but nothing passes to the outside.
        _mount("none", "/", _SLAVE | _RECURSIVE)
        kept = [path for path in writable if Path(path).exists()]
        for path in kept:
            _mount(path, path, _BIND | _RECURSIVE)
    except OSError:
        # Some systems give user namespaces without privileges in them.
        return False
    for place in _mount_points():
        if not any(place == path or place.startswith(path.rstrip("/") + "/") for path in kept):
            _make_read_only(place)
    # Below a bind mount only from now on.
    with contextlib.suppress(OSError):
        os.chdir(Path.cwd())
    return True


def _unshared(flags: int) -> bool:
    return bool(ctypes.CDLL(None, use_errno=True).unshare(ctypes.c_int(flags)) == 0)


def _map_own_ids(user: int, group: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(text)


def _mount(source: str, target: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(flags), None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _make_read_only(place: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    # Fails for places behind another mount or a closed directory, and for special files: all out of reach.
    libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(place), 0, _READ_ONLY, ctypes.c_size_t(len(_READ_ONLY)))


def _mount_points() -> Iterator[str]:
    """Places of the mounts that have files of users."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields, _, rest = line.partition(b" - ")
        if rest.split(b" ")[0].decode() not in _PSEUDO:
            # Spaces and the like are written in octal.
            place = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), fields.split(b" ")[4])
            yield os.fsdecode(place)
