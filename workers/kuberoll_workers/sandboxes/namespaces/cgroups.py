"""Control groups of sandboxes, where this process may make some: of version 2 or of version 1. `cgroups(7)`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_CONTROLLERS: Final = ("memory", "pids", "cpu")
_PARENT: Final = "kuberoll-sandboxes"
_PERIOD: Final = 100_000
_REMOVE_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a control group limits; None: nothing.

    Attributes:
        cpus: Processors.
        memory: Bytes.
        processes: Processes and threads.
    """

    cpus: float | None
    memory: int | None
    processes: int

    def settings(self, version: int) -> Sequence[tuple[str, str, str]]:
        """Controller, file and content of each limit."""
        quota = None if self.cpus is None else max(1000, round(self.cpus * _PERIOD))
        if version == 2:
            found = [("pids", "pids.max", str(self.processes))]
            if self.memory is not None:
                found += [("memory", "memory.max", str(self.memory)), ("memory", "memory.swap.max", "0")]
            return found + ([] if quota is None else [("cpu", "cpu.max", f"{quota} {_PERIOD}")])
        found = [("pids", "pids.max", str(self.processes))]
        if self.memory is not None:
            # The second needs accounting of swap, which not all kernels have.
            found += [("memory", name, str(self.memory)) for name in _MEMORY_FILES]
        if quota is not None:
            found += [("cpu", "cpu.cfs_period_us", str(_PERIOD)), ("cpu", "cpu.cfs_quota_us", str(quota))]
        return found


_MEMORY_FILES: Final = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
_OPTIONAL: Final = frozenset({"memory.memsw.limit_in_bytes", "memory.swap.max"})


class Groups:
    """The place of sandboxes' control groups.

    Attributes:
        version: 1 or 2.
        missing: Controllers that cannot be had.
    """

    def __init__(self, version: int, parents: Mapping[str, Path]) -> None:
        """`parents` has the directory in which groups are made, by controller."""
        self.version = version
        self._parents = dict(parents)
        self.missing = tuple(name for name in _CONTROLLERS if name not in parents)

    def make(self, name: str, limits: Limits) -> Group:
        """Make the group of a sandbox.

        Raises:
            OSError: A limit cannot be set.
        """
        group = Group(tuple(dict.fromkeys(parent / name for parent in self._parents.values())))
        try:
            for place in group.places:
                place.mkdir(exist_ok=True)
            for controller, file, content in limits.settings(self.version):
                if controller in self._parents:
                    try:
                        (self._parents[controller] / name / file).write_text(content)
                    except OSError:
                        if file not in _OPTIONAL:
                            raise
        except OSError:
            group.remove()
            raise
        return group


@dataclass(frozen=True, slots=True)
class Group:
    """The control group of one sandbox.

    Attributes:
        places: Its directories.
    """

    places: tuple[Path, ...]

    def join(self) -> None:
        """Put this process into it, with all that it will start.

        Raises:
            OSError: The system refuses.
        """
        for place in self.places:
            (place / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Remove it; its processes are gone, or about to be."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        for place in self.places:
            while place.exists():
                with contextlib.suppress(OSError):
                    place.rmdir()
                    break
                if time.monotonic() > deadline:
                    return
                time.sleep(0.002)


def find_groups(owner: str) -> Groups:
    """The place where this process makes control groups; without one, all controllers are missing.

    Args:
        owner: Name of the directory of this process's sandboxes.
    """
    if (_ROOT / "cgroup.controllers").exists():
        return _unified(owner)
    parents: dict[str, Path] = {}
    for controller in _CONTROLLERS:
        place = _ROOT / controller / _PARENT / owner
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            if os.access(place / "cgroup.procs", os.W_OK):
                parents[controller] = place
    return Groups(1, parents)


def _unified(owner: str) -> Groups:
    # Only the topmost group may have both processes and groups with controllers; further down that takes a manager,
    # such as systemd, to give this process a group of its own.
    parents: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        place = _ROOT / _PARENT / owner
        for above in (_ROOT, _ROOT / _PARENT):
            above.mkdir(exist_ok=True)
            for controller in _CONTROLLERS:
                with contextlib.suppress(OSError):
                    (above / "cgroup.subtree_control").write_text(f"+{controller}")
        place.mkdir(exist_ok=True)
        for controller in _CONTROLLERS:
            with contextlib.suppress(OSError):
                (place / "cgroup.subtree_control").write_text(f"+{controller}")
                parents[controller] = place
    return Groups(2, parents)


def remove_groups(owner: str) -> None:
    """Remove the directories of sandboxes of an owner whose processes are gone."""
    for place in {_ROOT / _PARENT / owner, *(_ROOT / name / _PARENT / owner for name in _CONTROLLERS)}:
        with contextlib.suppress(OSError):
            for child in place.iterdir():
                if child.is_dir():
                    Group((child,)).remove()
            place.rmdir()
