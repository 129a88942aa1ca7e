"""A run and its trainer in one event loop: real workers, a simulated engine, the journals of a directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kuberoll.trainer import Batch, Rollouts
from kuberoll_api.contract import ServeArgs
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.record import DroppedRecord, TrajectoryRecord
from kuberoll_workers.dataset.inputs import scan
from kuberoll_workers.output.manifest import MANIFEST
from kuberoll_workers.output.records import dropped, shard_name, trajectories
from kuberoll_workers.output.run_directory import RunDirectory, new_manifest
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.serving.engines.simulated import Simulated
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker.config import Progress, WorkerConfig
from kuberoll_workers.worker.environments import isolated_environment_factory
from kuberoll_workers.worker.run import run_worker
from tests.local.support import TINY, WAYS


def job(*, shards: int = 1, simulated: dict[str, Any] | None = None, **spec: Any) -> RolloutJob:
    """A job of puzzles with passes without end."""
    document = {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "paced"},
        "spec": {
            "generation": {
                "model": {"source": str(TINY)},
                "engine": "Simulated",
                "simulated": {"responses": WAYS, "firstTokenSeconds": 0.002, "sigma": 1.0} | (simulated or {}),
            },
            "environments": [
                {"name": "puzzle", "type": "sliding_puzzle", "config": {"size": 2, "shuffleMoves": 6, "maxMoves": 6}}
            ],
            "dataset": {"source": {"generator": {"count": 12}}, "repeats": 3, "epochs": None, "shuffleSeed": 1},
            "workers": {"replicas": shards},
            **spec,
        },
    }
    return RolloutJob.model_validate(document)


@dataclass(slots=True)
class Played:
    """What a trainer has had.

    Attributes:
        keys: Of each taken group, in order.
        lags: Of each taken trajectory: versions between its oldest token and the newest weights.
        seconds: Wall seconds of the trainer's steps.
    """

    keys: list[tuple[int, int]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, batch: Batch, version: int) -> None:
        """Take a batch at a version of the weights."""
        for group in batch.groups:
            self.keys.append((group.key.task_index, group.key.number))
        self.lags += lags_of(batch, version)


def lags_of(batch: Batch, version: int) -> list[int]:
    """Versions between the oldest token of each trajectory and the newest weights."""
    return [
        version - min(int(name) for message in record.messages for name, *_ in message.policy_versions or ())
        for group in batch.groups
        for record in group.trajectories
    ]


class PacedRun:
    """Workers of a run in a directory, one for each shard, which may be killed and started again."""

    def __init__(self, output: Path, given: RolloutJob) -> None:
        """Write the run's manifest."""
        self.output = output
        self.job = given
        self.storage = DirectoryStorage(output)
        output.mkdir(exist_ok=True)
        simulated = given.spec.generation.simulated
        assert simulated is not None
        self.engine = Simulated.of(ServeArgs.of(given.spec.generation))
        self.progress = [Progress() for _ in range(given.spec.workers.shard_count)]
        self.metrics = RolloutMetrics("paced")
        self._tasks: list[asyncio.Task[bool]] = []
        self.inputs = scan(
            given,
            base=Path("/"),
            environment=isolated_environment_factory(given, protected=()),
            shards=given.spec.workers.shard_count,
        )
        if not (output / MANIFEST).exists():
            manifest = new_manifest(given, shards=given.spec.workers.shard_count, inputs=self.inputs.as_json())
            directory = RunDirectory(self.storage)
            directory.open(manifest, resume=False)
            directory.close()

    async def __aenter__(self) -> PacedRun:
        await self.engine.start()
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    def start(self) -> None:
        """Start the workers."""
        self._tasks = [asyncio.ensure_future(self._work(shard)) for shard in range(len(self.progress))]

    async def kill(self) -> None:
        """End the workers at once, in the middle of what they do."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ended(self) -> bool:
        """Wait until the workers have ended by themselves; True if their shards are done."""
        return all(await asyncio.gather(*self._tasks))

    def has_stored(self, count: int) -> Callable[[], bool]:
        """A predicate: true if so many trajectories have been stored since the start."""
        return lambda: sum(one.trajectories for one in self.progress) == count

    def open(self, **options: Any) -> Rollouts:
        """The run's trainer."""
        return Rollouts.open(str(self.output), allow_simulated=True, **options)

    def stored(self) -> list[TrajectoryRecord]:
        """All finished trajectories."""
        names = [shard_name(shard) for shard in range(len(self.progress))]
        return [record for name in names for record in trajectories(self.storage, name)]

    def dropped(self) -> list[DroppedRecord]:
        """All dropped trajectories."""
        return list(dropped(self.storage))

    async def _work(self, shard: int) -> bool:
        config = WorkerConfig(
            job=self.job,
            base="/",
            tokenizer=str(TINY),
            endpoint=None,
            max_model_len=512,
            output=str(self.output),
            turns=str(self.output),
            shards=[shard],
            shard_count=len(self.progress),
        )
        self.progress[shard] = Progress()
        return await run_worker(
            config, metrics=self.metrics, drain=Drain(), progress=self.progress[shard], policy=self.engine
        )


async def train(
    run: PacedRun,
    rollouts: Rollouts,
    *,
    groups: int,
    steps: int,
    check: Callable[[Batch], None] = lambda _batch: None,
) -> Played:
    """Take batches and publish weights after each, as a trainer does."""
    played, began = Played(), time.perf_counter()
    async for batch in rollouts.batches_async(groups, timeout=60):
        played.add(batch, rollouts.version)
        check(batch)
        await run.engine.load_weights(None, str(rollouts.version + 1))
        rollouts.published()
        if len(played.keys) >= steps * groups:
            break
    played.seconds = time.perf_counter() - began
    return played
