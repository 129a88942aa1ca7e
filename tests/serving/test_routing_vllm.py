"""Workers and two replicas of real vLLM: new weights are pushed, and a replica is killed, in mid-run."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safetensors.torch import load_file, save_file

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.output import records
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker.config import Progress, WorkerConfig
from kuberoll_workers.worker.run import run_worker
from tests.local.support import TINY
from tests.rollouts.fakes import until
from tests.serving.hosts import TOKENS, starting, until_ready
from tests.serving.test_routing_serve import replicas_of

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
TRAJECTORIES = 512
ENGINE = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 27}
JOB: dict[str, Any] = {
    "apiVersion": "kuberoll.io/v1alpha1",
    "kind": "RolloutJob",
    "metadata": {"name": "test"},
    "spec": {
        "generation": {"model": {"source": str(TINY)}, "sampling": {"maxTokens": 32}},
        "environments": [
            {"name": "puzzle", "type": "sliding_puzzle", "config": {"size": 2, "shuffleMoves": 10, "maxMoves": 6}}
        ],
        "dataset": {"source": {"generator": {"count": TRAJECTORIES // 4}}, "repeats": 4},
        "rollout": {"concurrency": 24},
    },
}


def other_weights(directory: Path) -> Path:
    """The same model, a little less sure of itself."""
    shutil.copytree(TINY, directory)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = (tensor * 0.98).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def check_versions(record: TrajectoryRecord) -> set[str]:
    """Every generated token has one version; which there are."""
    found = set()
    for message in record.messages:
        if message.role != "assistant":
            continue
        assert message.policy_versions is not None
        end = 0
        for version, start, stop in message.policy_versions:
            assert (start, stop > start) == (end, True)
            found.add(version)
            end = stop
        assert end == len(message.token_ids)
        assert message.logprobs is not None
        assert len(message.logprobs) == end
    return found


async def test_weights_are_pushed_and_a_replica_is_killed_in_mid_run(tmp_path: Path) -> None:
    output, weights = tmp_path / "out", other_weights(tmp_path / "step-2")
    await asyncio.to_thread(output.mkdir)
    app: dict[str, Any] = {"model": str(TINY), "tokenizer": str(TINY), "engine": "VLLM", "engine_args": ENGINE}
    with starting(**app, replicas=2, tokens=TOKENS) as host:
        url = (await asyncio.to_thread(until_ready, host))[-1]["url"]
        config = WorkerConfig(
            job=RolloutJob.model_validate(JOB), base="/",
            tokenizer=str(TINY), endpoint=url, max_model_len=512, output=str(output), turns=None,
            shards=[0], shard_count=1, token=TOKENS.generate,
        )  # fmt: skip
        progress, metrics = Progress(), RolloutMetrics("test")
        running = asyncio.create_task(run_worker(config, metrics=metrics, drain=Drain(), progress=progress))
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {TOKENS.weights}"}) as session:
            await until(lambda: progress.trajectories > TRAJECTORIES // 8 or running.done())
            async with session.post(f"{url}/v1/weights", json={"uri": str(weights), "version": "step-2"}) as answer:
                assert answer.status == 202
            while True:
                async with session.get(f"{url}/v1/weights") as answer:
                    said = await answer.json()
                if set(said["replicas"].values()) == {"step-2"} and len(said["replicas"]) == 2:
                    break
                assert not running.done(), "it was over before the weights were there"
        victim, _ = replicas_of(host)
        victim.kill()
        assert await running
        assert not running.cancelled()
    storage = DirectoryStorage(output)
    assert not list(records.failures(storage))
    found = [record for shard in storage.shards() for record in records.trajectories(storage, shard)]
    assert len({record.key for record in found}) == len(found) == TRAJECTORIES
    versions = [check_versions(record) for record in found]
    assert {"0"} in versions
    assert {"step-2"} in versions
    assert set().union(*versions) == {"0", "step-2"}
    assert metrics.routing.policy_version == "step-2"
