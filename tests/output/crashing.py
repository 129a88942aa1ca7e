"""A worker in a process of its own, to be killed: imported by the process that it is forked from."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers.models.auto.tokenization_auto  # noqa: F401 - so that not every child has to

from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.analysis.aggregation.aggregates import aggregate
from kuberoll_workers.analysis.report.make import PAGE, read_report
from kuberoll_workers.dataset.inputs import scan
from kuberoll_workers.output.records import DROPPED, FAILURES
from kuberoll_workers.output.run_directory import RunDirectory, new_manifest
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.storage import open_storage
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.serving.engines.simulated import Simulated
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker.config import Progress, WorkerConfig
from kuberoll_workers.worker.environments import environment_factory
from kuberoll_workers.worker.run import run_worker

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-policy"
WAYS = [f"<action>{way}</action>" for way in ("up", "down", "left", "right")]
SHARDS = 2


def job(tasks: int, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "crash"},
        "spec": {
            "generation": {"model": {"source": str(TINY)}, "engine": "Simulated"},
            "environments": [
                {
                    "name": "puzzle",
                    "type": "sliding_puzzle",
                    "config": {"size": 2, "shuffleMoves": 6, "maxMoves": 6},
                    "isolation": "Inline",
                }
            ],
            "dataset": {"source": {"generator": {"count": tasks}}, "repeats": 4},
            **spec,
        },
    }


def run(
    document: dict[str, Any], output: str, turns: str | None, seconds: float, environment: dict[str, str] | None = None
) -> None:
    """Run all shards of a job; each generation takes about so many seconds."""
    os.environ.update(environment or {})
    asyncio.run(_run(_config(document, output, turns), seconds))


def _config(document: dict[str, Any], output: str, turns: str | None, **of_inputs: Any) -> WorkerConfig:
    return WorkerConfig(
        job=RolloutJob.model_validate(document),
        base="/",
        tokenizer=str(TINY),
        endpoint="",
        max_model_len=512,
        output=output,
        turns=turns,
        shards=list(range(SHARDS)),
        shard_count=SHARDS,
        **of_inputs,
    )


async def _run(config: WorkerConfig, seconds: float, progress: Progress | None = None) -> None:
    engine = Simulated(
        model="none",
        tokenizer=str(TINY),
        settings=SimulatedEngine.model_validate({"responses": WAYS, "firstTokenSeconds": seconds, "sigma": 1.0}),
        engine_args={"max_model_len": 512},
    )
    await engine.start()
    await run_worker(
        config, metrics=RolloutMetrics("crash"), drain=Drain(), progress=progress or Progress(), policy=engine
    )


CRASHED = 77
_OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


class Points:
    """The moments in which a process touches files below a directory: before each of them it may crash."""

    def __init__(self, directory: str, crash_at: int | None) -> None:
        self.passed = 0
        self._directory = directory
        self._crash_at = crash_at
        self._armed = True

    def install(self) -> None:
        """Watch this process; it cannot be undone."""
        sys.addaudithook(self._audit)
        write, fsync = os.write, os.fsync

        def watched_write(descriptor: int, data: Any) -> int:
            if self._inside(descriptor):
                # Half of the line is there, as after a crash of the machine.
                self._point(lambda: write(descriptor, bytes(data)[: len(data) // 2]))
            return write(descriptor, data)

        def watched_fsync(descriptor: int) -> None:
            if self._inside(descriptor):
                self._point()
            fsync(descriptor)

        os.write, os.fsync = watched_write, watched_fsync  # type: ignore[assignment]

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _OPERATIONS or not self._armed:
            return
        path, *rest = arguments
        # Reading changes nothing.
        written = event != "open" or bool(rest[-1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if written and isinstance(path, str | bytes) and os.fsdecode(path).startswith(self._directory):
            self._point()

    def _inside(self, descriptor: int) -> bool:
        self._armed = False
        try:
            return str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(self._directory)
        finally:
            self._armed = True

    def _point(self, last: Callable[[], object] = lambda: None) -> None:
        if self.passed == self._crash_at:
            last()
            os._exit(CRASHED)
        self.passed += 1


class _Acknowledged(Progress):
    """Notes, outside the run, each trajectory that is said to be stored."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, result: Any) -> None:
        super().add(result)
        os.write(self._file, f"{result.task_index} {result.rollout_index}\n".encode())


def run_whole(
    document: dict[str, Any], output: str, acknowledged: str, points: str | None, crash_at: int | None
) -> None:
    """A whole run as `kuberoll run` makes it, from the lock of the directory to the report.

    Args:
        acknowledged: File of the trajectories that were said to be stored, one a line.
        points: File for the number of moments in which it could have crashed; None: it goes undisturbed.
        crash_at: The moment before which it crashes; None: none.
    """
    watched = Points(output, crash_at)
    if points is not None:
        watched.install()
    made = RolloutJob.model_validate(document)
    storage = open_storage(output)
    directory = RunDirectory(storage)
    inputs = scan(made, base=Path("/"), environment=environment_factory(made))
    directory.open(new_manifest(made, shards=SHARDS, inputs=inputs.as_json()), resume=True)
    config = _config(document, output, output, tasks=inputs.tasks, rollouts=inputs.rollouts, blocks=list(inputs.blocks))
    asyncio.run(_run(config, 0.0, _Acknowledged(acknowledged)))
    for journal in (FAILURES, DROPPED):
        storage.compact(journal)
    run_files = RunFiles(output)
    aggregate([run_files]).write_beside(run_files)
    run_files.write(PAGE, read_report(run_files).page)
    directory.close()
    if points is not None:
        Path(points).write_text(str(watched.passed))
