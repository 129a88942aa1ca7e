"""Landlock: restricts this process, and all that it starts, to the files that it needs.

Uses the system calls of Linux 5.13 and later (`Documentation/userspace-api/landlock.rst`) by number, because C
libraries have no functions for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import stat
import struct
import sys
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_SET_NO_NEW_PRIVS = 38

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE, IOCTL_DEV, RESOLVE_UNIX = 1 << 13, 1 << 14, 1 << 15, 1 << 16
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV | RESOLVE_UNIX

READ = EXECUTE | READ_FILE | READ_DIR
"""Read, execute and list."""
DEVICE = READ_FILE | WRITE_FILE | READ_DIR | TRUNCATE | IOCTL_DEV
"""Use existing files, create none."""
SOCKET = READ_FILE | WRITE_FILE | RESOLVE_UNIX
"""Connect to a Unix socket that others have made; those made within the domain are open to it in any case."""
EVERYTHING = (1 << 17) - 1

_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
SOCKETS_SINCE = 9
"""Version from which Landlock closes Unix sockets with a path. Linux 7.1."""
SCOPES_SINCE = 6
"""Version from which Landlock keeps signals and abstract sockets within a domain. Linux 6.12."""


class LandlockFailed(OSError):
    """The kernel has Landlock but rejected the rules."""


def abi() -> int:
    """Version of the kernel's Landlock; 0 if it has none, it is switched off, or seccomp forbids it."""
    if sys.platform != "linux":
        return 0
    return max(0, _syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION)))


def restrict(rules: Iterable[tuple[str, int]], *, scoped: bool = True) -> None:
    """Restrict this thread, and all that it starts, to some files, irrevocably.

    It can then no longer trace processes outside or, from ABI 6 on, send them signals or reach their abstract sockets.

    Args:
        rules: Paths, and the rights to them and everything below. Paths that do not exist are skipped.
        scoped: False to leave signals and abstract sockets as they are.

    Raises:
        LandlockFailed: The kernel rejected the rules; nothing is restricted.
    """
    version = abi()
    _restrict(version, _handled(version), rules, _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if scoped else 0)


def restrict_signals() -> bool:
    """Restrict this thread, and all that it starts, to send signals to one another only; files stay as they are.

    Returns:
        False if the kernel cannot.

    Raises:
        LandlockFailed: The kernel rejected it.
    """
    version = abi()
    if version < SCOPES_SINCE:
        return False
    _restrict(version, 0, (), _SCOPE_SIGNALS)
    return True


def _restrict(version: int, handled: int, rules: Iterable[tuple[str, int]], scopes: int) -> None:
    attributes = struct.pack("=QQQ", handled, 0, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _checked(
        "landlock_create_ruleset",
        _syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)),
    )
    try:
        for path, rights in rules:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _add(ruleset, path, rights & handled)
        _checked("PR_SET_NO_NEW_PRIVS", _libc().prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked("landlock_restrict_self", _syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)))
    finally:
        os.close(ruleset)


def _handled(version: int) -> int:
    # An older kernel does not know the rights of later versions and would reject the whole ruleset.
    later = ((REFER, 2), (TRUNCATE, 3), (IOCTL_DEV, 5), (RESOLVE_UNIX, SOCKETS_SINCE))
    known = EVERYTHING & ~(REFER | TRUNCATE | IOCTL_DEV | RESOLVE_UNIX)
    for right, since in later:
        if version >= since:
            known |= right
    return known


def _add(ruleset: int, path: str, rights: int) -> None:
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(beneath).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, beneath)
        result = _syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
        _checked(f"landlock_add_rule for {path}", result)
    finally:
        os.close(beneath)


def _syscall(number: int, *arguments: object) -> int:
    return int(_libc().syscall(ctypes.c_long(number), *arguments))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise LandlockFailed(number, f"{what}: {os.strerror(number)}")
    return result
