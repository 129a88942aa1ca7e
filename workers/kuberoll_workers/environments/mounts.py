"""A view of the file system in which only some directories can be changed, made of mount and user namespaces.

Landlock does not cover modes, owners, times and extended attributes of files; on a read-only mount the kernel refuses
to change them, too. `mount_namespaces(7)`, `user_namespaces(7)` and `mount_setattr(2)` have the rules.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import stat
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_NEW_MOUNTS, _NEW_IPC, _NEW_USER = 0x00020000, 0x08000000, 0x10000000
_NO_SUID, _NO_DEVICES, _BIND, _RECURSIVE, _SLAVE = 1 << 1, 1 << 2, 1 << 12, 1 << 14, 1 << 19
_SHARED_MEMORY = "/dev/shm"
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


def enter_view(
    *, writable: Iterable[str], closed: Iterable[str] = (), opened: Iterable[str] = (), sockets: Iterable[str] = ()
) -> bool:
    """Give this process, and all that it starts, a view of the files of its own: read-only but some directories.

    System V memory, message queues and `/dev/shm` are its own, too. Irrevocable once capabilities are dropped. The
    process must have a single thread.

    Args:
        writable: Real paths of directories, or files, that stay as they are.
        closed: Real paths of directories that are seen empty.
        opened: Real paths inside of them that are seen nevertheless.
        sockets: Real paths of Unix sockets that are seen as a device without content.

    Returns:
        False, with all files as before, if the system does not let this process have namespaces: on other systems than
        Linux 5.12, in containers without privileges, where unprivileged user namespaces are switched off.
    """
    if sys.platform != "linux":
        return False
    user, group = os.getuid(), os.getgid()
    # Namespaces without one of users are for privileged users; then owners of files are seen as they are.
    if not _unshared(_NEW_MOUNTS | _NEW_IPC):
        if not (os.access("/proc/self/uid_map", os.W_OK) and _unshared(_NEW_USER | _NEW_MOUNTS | _NEW_IPC)):
            return False
        _map_own_ids(user, group)
    try:
        # What is unmounted outside later is unmounted here, too, but nothing passes to the outside.
        _mount("none", "/", _SLAVE | _RECURSIVE)
        kept = [path for path in writable if Path(path).exists()]
        if _SHARED_MEMORY not in kept and Path(_SHARED_MEMORY).is_dir():
            _mount("tmpfs", _SHARED_MEMORY, _NO_SUID | _NO_DEVICES, kind="tmpfs", options="mode=1777")
            kept.append(_SHARED_MEMORY)
        for path in kept:
            _mount(path, path, _BIND | _RECURSIVE)
        for path in sockets:
            # Fails for those that are out of reach anyway.
            with contextlib.suppress(OSError):
                _mount(os.devnull, path, _BIND)
        _close(sorted(closed), [*opened, *kept])
    except OSError:
        # Some systems give user namespaces without privileges in them.
        return False
    for place in _mount_points():
        if not any(_within(place, path) for path in kept):
            _make_read_only(place)
    # Below a bind mount only from now on.
    with contextlib.suppress(OSError):
        os.chdir(Path.cwd())
    return True


def _close(closed: list[str], opened: list[str]) -> None:
    """Mount empty directories over some, the outer before the inner, and in these what is to be seen in them."""
    # Held by descriptors, because their paths are covered when they are mounted again.
    seen: dict[str, int] = {}
    try:
        for path in sorted(set(opened)):
            if any(_within(path, directory) for directory in closed):
                with contextlib.suppress(OSError):
                    seen[path] = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        for directory in closed:
            if Path(directory).is_dir():
                _mount("tmpfs", directory, _NO_SUID | _NO_DEVICES, kind="tmpfs", options="mode=755")
                for path, descriptor in seen.items():
                    # In a directory that was opened itself, it is there already.
                    if _within(path, directory) and not os.path.lexists(path):
                        _show(path, descriptor)
    finally:
        for descriptor in seen.values():
            os.close(descriptor)


def _show(path: str, descriptor: int) -> None:
    """Make what a descriptor stands for visible at a path in an empty directory."""
    mode = os.fstat(descriptor).st_mode
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(mode):
        place.symlink_to(os.readlink("", dir_fd=descriptor))
        return
    if stat.S_ISDIR(mode):
        place.mkdir()
    else:
        place.touch()
    _mount(f"/proc/self/fd/{descriptor}", path, _BIND | _RECURSIVE)


@functools.cache
def is_available() -> bool:
    """True if this system lets a process of this user have a view of the files of its own."""
    if sys.platform != "linux":
        return False
    probe = (
        "import ctypes, sys; c = ctypes.CDLL(None); "
        f"c.unshare({_NEW_MOUNTS}) and c.unshare({_NEW_USER | _NEW_MOUNTS}) and sys.exit(1); "
        f"sys.exit(c.mount(b'none', b'/', None, ctypes.c_ulong({_SLAVE | _RECURSIVE}), None) != 0)"
    )
    # Not in this process, whose view would be another.
    return subprocess.run([sys.executable, "-I", "-S", "-c", probe], check=False).returncode == 0


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _unshared(flags: int) -> bool:
    return bool(ctypes.CDLL(None, use_errno=True).unshare(ctypes.c_int(flags)) == 0)


def _map_own_ids(user: int, group: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(text)


def _mount(source: str, target: str, flags: int, *, kind: str | None = None, options: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    texts = [None if text is None else text.encode() for text in (kind, options)]
    if libc.mount(os.fsencode(source), os.fsencode(target), texts[0], ctypes.c_ulong(flags), texts[1]):
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
