"""Watchdog that ends every process of a run, even if the run's own process was killed.

`kuberoll run` starts this first and keeps a pipe to it. The kernel closes the pipe when the run's process ends,
for whatever reason; then every process that inherited the run's id in its environment is killed. Process
groups and parent-death signals do not reach as far: Ray, its proxy and the engine start sessions of their own.

    python -m kuberoll_workers.local.watchdog RUN_ID [DIRECTORY_TO_REMOVE]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from kuberoll_workers.data.lifetime import RUN_ID_VARIABLE
from kuberoll_workers.serving.processes import kill_all


def run_variables(run_id: str) -> dict[str, str]:
    """Environment variables that identify the processes of a run."""
    return {
        RUN_ID_VARIABLE: run_id,
        # Ray's agents and vLLM set their titles by setproctitle, which by default overwrites the variables.
        "SPT_NOENV": "1",
    }


@contextmanager
def watchdog(run_id: str, scratch: Path) -> Iterator[None]:
    """Run the watchdog of this process while the context lasts; wait for it at the end.

    Args:
        scratch: Directory that it removes.
    """
    command = [sys.executable, "-m", "kuberoll_workers.local.watchdog", run_id, str(scratch)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=dict(os.environ))
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()


def processes_of(run_id: str) -> Iterator[psutil.Process]:
    """Find all processes of a run except this one."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_ID_VARIABLE) == run_id:
                yield process
        except psutil.Error:
            continue


def end_processes(run_id: str) -> None:
    """Kill the processes of a run, including those started meanwhile."""
    kill_all(lambda: processes_of(run_id))


def main() -> None:
    """The process's entry point."""
    run_id, *directories = sys.argv[1:]
    sys.stdin.buffer.read()
    end_processes(run_id)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
