"""Removes what a containerd of the tests leaves, when those who started it are done or were killed.

python -m tests.containers.watchdog STATE DIRECTORY NETWORK    # waits until its standard input ends
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil


def shims(state: Path) -> Iterator[psutil.Process]:
    """The processes that hold the pods of the containerd with this state."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if words and Path(words[0]).name.startswith("containerd-shim") and f"{state}/s" in words:
                yield process


def remove(state: Path, directory: Path, network: str) -> None:
    """Kills pods that are left, unmounts what they had, and removes files and network."""
    for shim in shims(state):
        with contextlib.suppress(psutil.Error):
            for process in (*shim.children(recursive=True), shim):
                with contextlib.suppress(psutil.Error):
                    process.kill()
    mounts = [Path(item.mountpoint) for item in psutil.disk_partitions(all=True)]
    for mount in sorted(mounts, key=lambda path: len(path.parts), reverse=True):
        if mount.is_relative_to(state) or mount.is_relative_to(directory):
            subprocess.run(["umount", "--lazy", str(mount)], check=False, capture_output=True)
    for command in (["ip", "netns", "del", network], ["ip", "link", "del", network]):
        subprocess.run(command, check=False, capture_output=True)
    for folder in (state, directory):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
