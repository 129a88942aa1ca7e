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

from kuberoll_workers.serving.processes import kill_all

RUN_ID_VARIABLE = "KUBEROLL_RUN_ID"


def run_variables(run_id: str) -> dict[str, str]:
    """Environment variables of every process of a run, by which it is found."""
    return {
        RUN_ID_VARIABLE: run_id,
        # Ray's agents and vLLM write their titles by setproctitle, over their variables if they are let.
        "SPT_NOENV": "1",
    }


def processes_of(run_id: str) -> Iterator[psutil.Process]:
    """All processes of a run except this one."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_ID_VARIABLE) == run_id:
                yield process
        except psutil.Error:
            continue


def end_processes(run_id: str) -> None:
    """Kill the processes of a run, those too that they start meanwhile."""
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
