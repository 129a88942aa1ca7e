"""A worker that collects a million short trajectories: its memory, its speed, and what durability costs it.

The worker's own `run_worker`, dataset to finished shard, with the simulated engine in its process: HTTP and the engine
are measured elsewhere. One turn each, from a JSON-lines dataset that is streamed, groups of four. It is run as it is,
then resumed after everything is there (nothing is to be done but to read), and, for the journal's share, a part of it
once more with every record encoded and thrown away instead of stored, and once more with no record encoded at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.record import TurnRecord, encode_line
from kuberoll_workers.output.store import ResultStore
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.serving.engines.simulated import Simulated
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker.config import Progress, WorkerConfig
from kuberoll_workers.worker.garbage import tune_garbage_collector
from kuberoll_workers.worker.run import run_worker

TINY = Path(__file__).parents[1] / "examples" / "models" / "tiny-policy"
REPEATS = 4
SAMPLE_SECONDS = 0.2


class Discarding(ResultStore):
    """Stores nothing."""

    encodes = False

    async def turn(self, turn: TurnRecord) -> None:
        if self.encodes:
            encode_line(turn)

    async def result(self, result: Any) -> None:
        if self.encodes:
            encode_line(result)
        self._stored(result)


class Encoding(Discarding):
    encodes = True


def job(dataset: Path, *, turns: bool) -> dict[str, Any]:
    return {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "benchmark"},
        "spec": {
            "generation": {"model": {"source": str(TINY)}, "engine": "Simulated"},
            "environments": [
                {"name": "instant", "entrypoint": "benchmarks.parts:ConfiguredEnvironment", "isolation": "Inline"}
            ],
            "dataset": {"source": {"uri": str(dataset)}, "repeats": REPEATS},
            "rollout": {"concurrency": 256, "journalTurns": turns},
        },
    }


async def collect(dataset: Path, output: Path, *, turns: bool) -> tuple[Progress, float, float, int]:
    """Progress, wall and CPU seconds, and the most bytes that were resident."""
    config = WorkerConfig(
        job=RolloutJob.model_validate(job(dataset, turns=turns)),
        base="/",
        tokenizer=str(TINY),
        endpoint="",
        max_model_len=512,
        output=str(output),
        turns=str(output) if turns else None,
        shards=[0],
        shard_count=1,
    )
    engine = Simulated(
        model="none",
        tokenizer=str(TINY),
        settings=SimulatedEngine.model_validate(
            {"responses": ["yes", "no"], "firstTokenSeconds": 0, "tokenSeconds": 0, "maxBatch": 1024}
        ),
        engine_args={"max_model_len": 512},
    )
    await engine.start()
    process, progress, peak = psutil.Process(), Progress(), 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, process.memory_info().rss)
            await asyncio.sleep(SAMPLE_SECONDS)

    watching = asyncio.create_task(watch())
    wall, cpu = time.perf_counter(), time.process_time()
    await run_worker(config, metrics=RolloutMetrics("benchmark"), drain=Drain(), progress=progress, policy=engine)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    watching.cancel()
    return progress, wall, cpu, peak


def write_rows(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"prompt": f"question {number}", "metadata": {"number": number, "left": 1}}) + "\n")


def main() -> None:
    import kuberoll_workers.worker.run as worker

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--turns", action="store_true", help="journal every turn too, as is the default of a job")
    arguments = parser.parse_args()
    tune_garbage_collector()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        rows = max(1, arguments.trajectories // REPEATS)
        write_rows(directory / "rows.jsonl", rows)
        write_rows(directory / "part.jsonl", min(rows, 10_000))

        def run(dataset: str, output: str) -> tuple[Progress, float, float, int]:
            (directory / output).mkdir(exist_ok=True)
            return asyncio.run(collect(directory / dataset, directory / output, turns=arguments.turns))

        # The first in a process pays for imports.
        run("part.jsonl", "warm")
        cpu: dict[str, list[float]] = {}
        for number in range(3):
            for kind in (ResultStore, Encoding, Discarding):
                worker.ResultStore = kind  # type: ignore[misc]
                part = run("part.jsonl", f"{kind.__name__}-{number}")
                cpu.setdefault(kind.__name__, []).append(part[2] / part[0].trajectories * 1e6)
        worker.ResultStore = ResultStore  # type: ignore[misc]
        whole, encoded, nothing = (min(cpu[name]) for name in ("ResultStore", "Encoding", "Discarding"))
        print(
            f"journal: {(whole - nothing) / whole:.1%} of the worker's CPU time ({whole:.0f} µs a trajectory in all; "
            f"encoding {encoded - nothing:.0f} µs, writing and syncing {whole - encoded:.0f} µs; best of 3)",
            flush=True,
        )
        progress, wall, seconds, peak = run("rows.jsonl", "whole")
        assert progress.trajectories == rows * REPEATS, progress
        size = sum(file.stat().st_size for file in (directory / "whole").iterdir())
        print(
            f"{progress.trajectories} trajectories: {progress.trajectories / wall:.0f} a second, "
            f"{seconds / progress.trajectories * 1e6:.0f} µs CPU each, {peak >> 20} MiB resident at most, "
            f"{size / progress.trajectories:.0f} bytes each on disk",
            flush=True,
        )
        progress, wall, seconds, peak = run("rows.jsonl", "whole")
        assert (progress.trajectories, progress.resumed) == (0, rows * REPEATS), progress
        print(f"resumed with nothing left to do: {wall:.1f} s, {peak >> 20} MiB resident at most")


if __name__ == "__main__":
    main()
