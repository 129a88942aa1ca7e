"""Parts of a run that start before its manifest has been read.

A worker needs half a second to import its modules, and so does the command. Here the worker begins first.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kuberoll_workers.data.lifetime import RUN_SCRATCH_VARIABLE
from kuberoll_workers.local.options import import_directories
from kuberoll_workers.local.processes import Child
from kuberoll_workers.local.scratch import scratch_directory
from kuberoll_workers.local.watchdog import run_variables


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStart:
    """What a run has from its first moment.

    Attributes:
        scratch: Its scratch directory.
        variables: Environment variables of its processes, by which the watchdog finds them.
        runner: Its event loop.
        worker: A worker that imports its modules and waits for a `WorkerStart`.
    """

    run_id: str
    base: Path
    scratch: Path
    variables: dict[str, str]
    runner: asyncio.Runner
    worker: Child

    @property
    def metrics(self) -> Path:
        """Directory into which workers write their metrics."""
        return self.scratch / "metrics"


@contextmanager
def early_start(base: Path) -> Iterator[EarlyStart]:
    """Start the first worker of a run; at the end it is killed if it still runs.

    Args:
        base: The manifest's directory.
    """
    run_id = uuid.uuid4().hex
    with scratch_directory() as scratch, asyncio.Runner() as runner:
        variables = {**run_variables(run_id), RUN_SCRATCH_VARIABLE: str(scratch)}
        metrics = scratch / "metrics"
        metrics.mkdir()
        worker = runner.run(start_worker(base, metrics, log=scratch / "worker.log", variables=variables))
        try:
            yield EarlyStart(
                run_id=run_id, base=base, scratch=scratch, variables=variables, runner=runner, worker=worker
            )
        finally:
            try:
                runner.run(worker.stop(0.0))
            finally:
                shutil.rmtree(scratch, ignore_errors=True)


async def start_worker(base: Path, metrics: Path, *, log: Path, variables: dict[str, str]) -> Child:
    """Start a worker process, which waits for a `WorkerStart`.

    Args:
        base: The manifest's directory: modules of entrypoints are searched there.
        metrics: Directory of the run's metrics.
    """
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*import_directories(base), *([given] if given else [])])
    environment = {**variables, "PROMETHEUS_MULTIPROC_DIR": str(metrics), "PYTHONPATH": path}
    return await Child.start("kuberoll_workers.worker", [], log=log, environment=environment)
