"""Owners of containers: which process made one, and whether that process is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Owner(NamedTuple):
    """A process, told from all that were and will be on this machine.

    Attributes:
        boot: Id of the system's start.
        namespace: Of its PID namespace.
        process: Its id there.
        started: When it started, in ticks since the system's start.
    """

    boot: str
    namespace: int
    process: int
    started: int

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @classmethod
    def of(cls, text: str) -> Owner | None:
        """Read what `str` gave; None: another release wrote it."""
        try:
            boot, namespace, process, started = text.split("/")
            return cls(boot, int(namespace), int(process), int(started))
        except ValueError:
            return None


def this_process() -> Owner:
    """This process."""
    started = start_of(os.getpid())
    assert started is not None
    return Owner(_BOOT.read_text().strip(), Path("/proc/self/ns/pid").stat().st_ino, os.getpid(), started)


def start_of(process: int) -> int | None:
    """When a process started; None: there is none (`proc(5)`, field 22 of `/proc/PID/stat`)."""
    try:
        # The name may have spaces and brackets.
        return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def is_gone(owner: Owner, here: Owner, start_of: Callable[[int], int | None] = start_of) -> bool:
    """Tell whether an owner is gone; False if that cannot be told from here.

    Args:
        here: This process.
    """
    if owner.boot != here.boot:
        return True
    # Ids of other PID namespaces say nothing here.
    return owner.namespace == here.namespace and start_of(owner.process) != owner.started
