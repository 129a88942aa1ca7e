"""How descendants of this process ended, their own parents aside."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from kuberoll_workers.serving.exit_watcher import ExitWatcher

KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
PATIENCE_SECONDS = 240

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="handles of processes are Linux's")


@contextmanager
def watcher() -> Iterator[ExitWatcher]:
    observer = ExitWatcher()
    observer.start()
    try:
        yield observer
    finally:
        observer.stop()


def test_a_child_that_a_signal_ends_is_seen_and_one_that_ends_by_itself_is_not() -> None:
    with watcher() as observer:
        killed = subprocess.Popen(["sleep", "600"])
        ending = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        observer.scan()
        ending.communicate(timeout=PATIENCE_SECONDS)
        killed.send_signal(signal.SIGKILL)
        # Not reaped: its parent may be slow.
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        assert observer.signal_exits() == {"sleep": -signal.SIGKILL}
        killed.wait(timeout=PATIENCE_SECONDS)
    assert observer.signal_exits() == {"sleep": -signal.SIGKILL}


@pytest.mark.skipif(KERNEL < (6, 15), reason="the kernel forgets the exit status of a process that was reaped")
def test_a_grandchild_whose_parent_has_reaped_it_is_seen() -> None:
    with watcher() as observer:
        parent = subprocess.Popen(
            ["sh", "-c", "sleep 600 & echo; wait; echo; cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.read(1) == b"\n"
        observer.scan()
        psutil.Process(parent.pid).children()[0].send_signal(signal.SIGSEGV)
        assert parent.stdout.read(1) == b"\n"
        assert list(observer.signal_exits().values()) == [-signal.SIGSEGV]
        parent.communicate(timeout=PATIENCE_SECONDS)


def test_the_first_to_die_comes_first() -> None:
    with watcher() as observer:
        first, second = subprocess.Popen(["sleep", "600"]), subprocess.Popen(["tail", "-f", "/dev/null"])
        observer.scan()
        for process in (second, first):
            process.send_signal(signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            observer.signal_exits()
        assert list(observer.signal_exits()) == ["tail", "sleep"]
        for process in (first, second):
            process.wait(timeout=PATIENCE_SECONDS)
