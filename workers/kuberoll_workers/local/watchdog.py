"""Ends every process of a run, however the run's own process ended.

`kuberoll run` starts this first and keeps a pipe to it. The kernel closes the pipe when the run's process is gone,
be it finished, crashed or killed; then everything that inherited the run's id in its environment is ended. Process
groups and parent-death signals do not reach as far: Ray, its proxy and the engine start sessions of their own.

    python -m kuberoll_workers.local.watchdog RUN_ID [DIRECTORY_TO_REMOVE]
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

import psutil

RUN_ID_VARIABLE = "KUBEROLL_RUN_ID"

_ROUNDS = 10


def processes_of(run_id: str) -> Iterator[psutil.Process]:
    """All processes of a run except this one."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_ID_VARIABLE) == run_id:
                yield process
        except psutil.Error:
            continue


def end_processes(run_id: str) -> int:
    """Kill the processes of a run, those too that they start meanwhile; returns how many there were."""
    killed = 0
    for _ in range(_ROUNDS):
        found = list(processes_of(run_id))
        if not found:
            break
        for process in found:
            try:
                process.kill()
                killed += 1
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=5)
    return killed


def main() -> None:
    """The process's entry point."""
    run_id, *directories = sys.argv[1:]
    sys.stdin.buffer.read()
    end_processes(run_id)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
