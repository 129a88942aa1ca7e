"""Processes that are killed, and what they shared."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from kuberoll_workers.local.watchdog import processes_of, run_variables
from kuberoll_workers.serving.processes import kill_all

PATIENCE_SECONDS = 240
SHARING = """
from multiprocessing import get_context, shared_memory
semaphore = get_context("spawn").Semaphore()
memory = shared_memory.SharedMemory(create=True, size=1)
print(semaphore._semlock.name, memory.name, flush=True)
input()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="/dev/shm is Linux's")
def test_what_killed_processes_shared_is_removed() -> None:
    run_id = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", SHARING], env=run_variables(run_id), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        semaphore, memory = process.stdout.readline().decode().split()
        shared = [Path(f"/dev/shm/sem.{semaphore.removeprefix('/')}"), Path("/dev/shm", memory)]
        assert [path.exists() for path in shared] == [True, True]
        assert len(list(processes_of(run_id))) == 2  # it and its resource tracker
        kill_all(lambda: processes_of(run_id))
        process.wait(PATIENCE_SECONDS)
    assert list(processes_of(run_id)) == []
    left = [path for path in shared if path.exists()]
    for path in left:
        path.unlink()
    assert left == []
