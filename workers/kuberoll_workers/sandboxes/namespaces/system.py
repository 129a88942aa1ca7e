"""System calls of mounts and namespaces. `mount(2)`, `unshare(2)`, `mount_setattr(2)`, `pivot_root(2)`, `prctl(2)`."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Final

NEW_MOUNTS, NEW_CGROUP, NEW_NAMES, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000

READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH: Final = 2

_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _SETNS = 442, 308
_PDEATHSIG, _BOUNDING_DROP, _NO_NEW_PRIVILEGES = 1, 24, 38
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def unshare(flags: int) -> None:
    """Give this process namespaces of its own.

    Raises:
        OSError: The system does not.
    """
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    """Mount a file system.

    Raises:
        OSError: The system refuses.
    """
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(
        _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {kind or source} {target}"
    )


def restrict(target: str, attributes: int, *, recursive: bool = False) -> None:
    """Add attributes (`READ_ONLY`, `NO_SUID`, `NO_DEVICES`, `NO_EXEC`) to a mount, which keeps those that it has.

    Raises:
        OSError: The system refuses.
    """
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = 0x8000 if recursive else 0
    _check(
        _libc.syscall(_MOUNT_SETATTR, -100, os.fsencode(target), flags, wanted, ctypes.c_size_t(len(wanted))),
        f"mount_setattr {target}",
    )


def unmount(target: str) -> None:
    """Take a mount away, as soon as nobody uses it.

    Raises:
        OSError: The system refuses.
    """
    _check(_libc.umount2(os.fsencode(target), DETACH), f"umount {target}")


def change_root(directory: str) -> None:
    """Make a directory, which is a mount of its own, the root of everything, and take the old one away.

    Raises:
        OSError: The system refuses.
    """
    os.chdir(directory)
    _check(_libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


def set_host_name(name: str) -> None:
    """Set the name of the machine."""
    text = os.fsencode(name)
    _check(_libc.sethostname(text, ctypes.c_size_t(len(text))), "sethostname")


def end_with_parent(signal: int) -> None:
    """Have this process sent a signal when the thread that made it ends; a change of users takes that back."""
    _libc.prctl(_PDEATHSIG, signal, 0, 0, 0)


def keep_capabilities(kept: frozenset[int]) -> None:
    """Give up capabilities for ever, also of programs that are executed."""
    for number in range(64):
        if number not in kept:
            # Fails for numbers that the kernel does not know.
            _libc.prctl(_BOUNDING_DROP, number, 0, 0, 0)
    bits = sum(1 << number for number in kept)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    # Version 3; of each half: effective, permitted, inheritable.
    header, data = struct.pack("=Ii", 0x20080522, 0), struct.pack("=IIIIII", low, low, 0, high, high, 0)
    _check(_libc.capset(header, data), "capset")
