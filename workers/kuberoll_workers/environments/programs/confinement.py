"""Confinement of a program's process: files, limits, system calls."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterable, Sequence

from kuberoll_workers.environments import landlock
from kuberoll_workers.environments.programs.model import ConfinementUnavailable, Limits
from kuberoll_workers.environments.programs.system_calls import CHANNEL, Filter

LANDLOCK_ABI = 3
"""Version of Landlock that is required: from this one on it also covers truncation. Linux 6.2."""
LANDLOCK_ABI_WITH_SIGNALS = 6
"""Version from which Landlock keeps signals within what it confines. Linux 6.12."""

# Programs and libraries, and what the C library and Python read at their start.
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
    "/etc/alternatives", "/etc/localtime", "/etc/mime.types", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat",
    "/proc/version", "/proc/loadavg", "/proc/filesystems",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SET_PDEATHSIG = 1


def readable_paths(prefixes: Iterable[str] | None = None) -> list[str]:
    """Paths that every program may read: the system's programs, this Python, and its packages."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return [*_SYSTEM, *(prefixes or (sys.prefix, sys.base_prefix)), *packages]


def variables(scratch: str, given: dict[str, str]) -> dict[str, str]:
    """Environment variables of a program."""
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONIOENCODING": "utf-8:replace",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **given,
    }


def enter(
    limits: Limits,
    filter: Filter,
    *,
    readable: Sequence[str],
    scratch: str,
    channel: socket.socket,
    signals_are_scoped: bool,
) -> None:
    """Confine this process, irrevocably, and send the listener of its filter over the channel.

    The launcher has dropped its capabilities, so that none is left.

    Raises:
        ConfinementUnavailable: The kernel refused a layer.
    """
    os.umask(0o077)
    _set_limits(limits)
    rules = [
        *((path, landlock.READ) for path in readable),
        *((path, landlock.DEVICE) for path in _DEVICES),
        (scratch, landlock.EVERYTHING),
    ]
    try:
        landlock.restrict(rules, scoped=signals_are_scoped)
    except landlock.LandlockFailed as error:
        raise ConfinementUnavailable(f"Landlock refused its rules: {error}") from error
    os.dup2(channel.fileno(), CHANNEL, inheritable=False)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits.open_files, limits.open_files))
    listener = filter.install()
    with socket.socket(fileno=CHANNEL) as sender:
        socket.send_fds(sender, [b"."], [listener])
        sender.detach()
    os.close(listener)


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, also if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _set_limits(limits: Limits) -> None:
    # The supervisor sums up all processes, and is to be the first; this one holds if it gets no time itself.
    seconds = int(-(-limits.cpu_seconds // 1)) + 1
    address_space = 2 * limits.memory + (1 << 30)
    for number, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, address_space, address_space),
        (resource.RLIMIT_FSIZE, limits.file, limits.file),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ):
        _, most = resource.getrlimit(number)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(number, (soft, hard))
