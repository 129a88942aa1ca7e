"""Workers and two replicas of the real Serve app, one of which is killed in mid-run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.local.watchdog import processes_of
from kuberoll_workers.output import records
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker.config import Progress, WorkerConfig
from kuberoll_workers.worker.run import run_worker
from tests.local.support import TINY, WAYS
from tests.rollouts.fakes import until
from tests.serving.hosts import PATIENCE_SECONDS, TOKENS, StartingHost, starting, until_ready

pytestmark = pytest.mark.ray

TRAJECTORIES = 96

JOB: dict[str, Any] = {
    "apiVersion": "kuberoll.io/v1alpha1",
    "kind": "RolloutJob",
    "metadata": {"name": "test"},
    "spec": {
        "generation": {"model": {"source": str(TINY)}, "engine": "Simulated"},
        "environments": [
            {"name": "puzzle", "type": "sliding_puzzle", "config": {"size": 2, "shuffleMoves": 6, "maxMoves": 8}}
        ],
        "dataset": {"source": {"generator": {"count": TRAJECTORIES // 4}}, "repeats": 4},
        "rollout": {"concurrency": 32, "retries": {"generationAttempts": 1}},
    },
}


async def run(url: str, output: Path, progress: Progress, metrics: RolloutMetrics) -> dict[Any, Any]:
    await asyncio.to_thread(output.mkdir)
    config = WorkerConfig(
        job=RolloutJob.model_validate(JOB),
        base="/",
        tokenizer=str(TINY),
        endpoint=url,
        max_model_len=512,
        output=str(output),
        turns=None,
        shards=[0],
        shard_count=1,
        token=TOKENS.generate,
    )
    await run_worker(config, metrics=metrics, drain=Drain(), progress=progress)
    storage = DirectoryStorage(output)
    assert not list(records.failures(storage))
    found = [record for shard in storage.shards() for record in records.trajectories(storage, shard)]
    assert len({record.key for record in found}) == len(found)
    return {
        record.key: ([list(message.token_ids) for message in record.messages], record.rewards, record.stop_reason)
        for record in found
    }


def replicas_of(host: StartingHost) -> list[psutil.Process]:
    return [process for process in processes_of(host.run_id) if "ServeReplica" in " ".join(process.cmdline())]


async def test_a_replica_that_is_stopped_or_killed_in_mid_run_loses_nothing(tmp_path: Path) -> None:
    simulated = {"responses": WAYS, "firstTokenSeconds": 0.03}
    with starting(model=str(TINY), tokenizer=str(TINY), simulated=simulated, replicas=2, tokens=TOKENS) as host:
        url = until_ready(host)[-1]["url"]
        async with asyncio.timeout(PATIENCE_SECONDS):
            metrics = RolloutMetrics("test")
            expected = await run(url, tmp_path / "undisturbed", Progress(), metrics)
            assert len(expected) == TRAJECTORIES
            outcomes = sent(metrics)
            assert set(outcomes) == {"answered"}

            for number in (signal.SIGSTOP, signal.SIGKILL):
                progress, metrics = Progress(), RolloutMetrics("test")
                running = asyncio.create_task(run(url, tmp_path / number.name, progress, metrics))
                await until(lambda: progress.trajectories > TRAJECTORIES // 4 or running.done())  # noqa: B023
                victim, _ = replicas_of(host)
                victim.send_signal(number)
                found = await running
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(signal.SIGCONT)
                assert found == expected
                # What was lost with the replica was asked of the other one, and counts once.
                disturbed = sent(metrics)
                assert disturbed["answered"] == outcomes["answered"]
                lost = {"lost"} if number == signal.SIGSTOP else {"failed", "unreachable"}
                assert sum(disturbed.get(outcome, 0) for outcome in lost) > 0


def sent(metrics: RolloutMetrics) -> dict[str, float]:
    metrics.flush()
    return {
        sample.labels["outcome"]: sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "kuberoll_policy_requests_total" and sample.value
    }
