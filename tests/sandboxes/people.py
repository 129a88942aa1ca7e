"""Ordinary users for tests that run as root: they exist in a mount namespace, and nowhere else.

They have an entry in a copy of `/etc/passwd`, and ids in copies of `/etc/subuid` and `/etc/subgid` if they are to have
some. Python is put where they may read it, if it is in a directory of root's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import kuberoll_workers

ROOT = Path(__file__).parents[2]
USER = 54321
NAME = "kuberoll-tests"
SUBORDINATE = (7_000_000, 65536)


@dataclass(frozen=True, slots=True)
class Person:
    """An ordinary user.

    Attributes:
        home: A directory of its own.
    """

    home: Path
    subordinate: bool

    def run(self, argv: Sequence[str], *, options: str = "", as_root: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a program as this user, from the repository's root.

        Args:
            options: Further options of setpriv.
            as_root: Run it as root, where this user's files are.
        """
        with tempfile.TemporaryDirectory() as folder:
            script = "\n".join(["set -e", *self._stage(Path(folder))])
            change = "" if as_root else f"setpriv --reuid={USER} --regid={USER} --clear-groups {options} --"
            script += f"\nexec {change} {shlex.join(argv)}"
            paths = ":".join(
                str(path) for path in {ROOT, *map(Path, os.environ.get("PYTHONPATH", "").split(":")), self.source()}
            )
            return subprocess.run(
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
                cwd=ROOT,
                env={**os.environ, "HOME": str(self.home), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                check=True,
                timeout=300,
            )

    @staticmethod
    def source() -> Path:
        """Where the code under test is."""
        return Path(next(iter(kuberoll_workers.__path__))).parent

    def _stage(self, folder: Path) -> Iterator[str]:
        lines = {"passwd": f"{NAME}:x:{USER}:{USER}::{self.home}:/bin/sh\n", "subuid": "", "subgid": ""}
        if self.subordinate:
            lines["subuid"] = lines["subgid"] = f"{USER}:{SUBORDINATE[0]}:{SUBORDINATE[1]}\n"
        for name, line in lines.items():
            path = Path("/etc") / name
            (folder / name).write_text((path.read_text() if path.exists() else "") + line)
            if path.exists():
                yield f"mount --bind {folder / name} {path}"
            elif line:
                pytest.skip(f"{path} is missing")
        yield from _opened([Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT, self.source()], folder)


def _opened(needed: Sequence[Path], folder: Path) -> Iterator[str]:
    """Put directories where everybody may read them, at the same paths."""
    closed: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(needed):
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & 0o001:
                closed.setdefault(parent, []).append(path)
                break
    for i, (parent, paths) in enumerate(closed.items()):
        held = [folder / f"held-{i}-{j}" for j in range(len(paths))]
        for path, place in zip(paths, held, strict=True):
            yield f"mkdir {place}; mount --rbind {path} {place}"
        yield f"mount -t tmpfs -o mode=755 none {parent}"
        for path, place in zip(paths, held, strict=True):
            yield f"mkdir -p {path}; mount --move {place} {path}"


@contextmanager
def ordinary(*, subordinate: bool) -> Iterator[Person]:
    """An ordinary user with a home; skips where tests cannot make one."""
    if os.geteuid():
        pytest.skip("only root makes users")
    for program in ("setpriv", "unshare", *(["newuidmap", "newgidmap"] if subordinate else [])):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (util-linux, uidmap)")
    home = Path(tempfile.mkdtemp(prefix="kuberoll-person-"))
    try:
        os.chown(home, USER, USER)
        yield Person(home, subordinate)
    finally:
        shutil.rmtree(home)
