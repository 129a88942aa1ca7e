"""RolloutJobs for tests in the cluster, and what is to be true of their output."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.output.run_files import RunFiles
from tests.cluster.api import Api, Object
from tests.cluster.pods import MODELS
from tests.containers.images import name_of

TINY = MODELS / "tiny-policy"
WORKER = name_of("worker")
CLAIM = "store"
ANSWERS = [f"<action>{way}</action>" for way in ("up", "down", "left", "right")]
CHILD_KINDS = (
    *("ConfigMap", "Deployment", "Service", "Job", "NetworkPolicy", "Pod", "PodDisruptionBudget", "ReplicaSet"),
    "Secret",
)


def light_engine() -> Object:
    """A pod template that puts the engine without Ray in the engine's place; probed as the real one."""
    command = ["python", "-m", "tests.cluster.engine_pod", "--config", "/etc/kuberoll/job.json"]
    # All pods share the machine's addresses: each has to keep to its own.
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return {"spec": {"containers": [{"name": "generation", "image": WORKER, "command": command, "env": [address]}]}}


def rollout_job(
    namespace: str,
    name: str = "puzzles",
    *,
    shards: int = 2,
    replicas: int = 2,
    count: int = 8,
    repeats: int = 2,
    seconds: float = 0.0,
    gpus: int = 1,
    light: bool = True,
    generation: Object | None = None,
    environment: Object | None = None,
    rollout: Object | None = None,
    workers: Object | None = None,
    **spec: Any,
) -> Object:
    """Puzzles against the simulated engine, output to a claim.

    Args:
        count: Prompts.
        repeats: Samples of each.
        seconds: That a turn takes the engine.
        light: Without Ray.
    """
    generation = {
        "backend": "Native",
        "model": {"source": str(TINY)},
        "engine": "Simulated",
        "simulated": {"responses": ANSWERS, "firstTokenSeconds": seconds},
        "resources": {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {},
        **({"podTemplate": light_engine()} if light else {}),
        **(generation or {}),
    }
    puzzle = {"name": "puzzle", "type": "sliding_puzzle", "config": {"size": 2, "maxMoves": 6}}
    return {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "generation": generation,
            "environments": [{**puzzle, **(environment or {})}],
            "dataset": {"source": {"generator": {"count": count}}, "repeats": repeats},
            "rollout": {"concurrency": 4, **(rollout or {})},
            "workers": {"replicas": replicas, "shards": shards, **(workers or {})},
            "output": {"uri": f"pvc://{CLAIM}/{name}"},
            **spec,
        },
    }


async def make_claim(api: Api, namespace: str) -> None:
    """The volume that jobs write to."""
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": CLAIM, "namespace": namespace}
    await api.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})


async def children(api: Api, namespace: str, kinds: Iterable[str] = CHILD_KINDS) -> list[str]:
    """Names of what belongs to RolloutJobs: `Kind/name`."""
    return [
        f"{kind}/{item['metadata']['name']}"
        for kind in kinds
        for item in await api.list(kind, namespace, labels="kuberoll.io/job")
    ]


def contents(records: Iterable[TrajectoryRecord]) -> dict[tuple[int, int], tuple[list[list[int]], float]]:
    """Token ids and reward by trajectory: what is to be the same however the run went."""
    return {
        record.key: ([list(message.token_ids) for message in record.messages], record.total_reward)
        for record in records
    }


def read_output(directory: Path) -> list[TrajectoryRecord]:
    """All trajectories of a run; each one once."""
    found = list(RunFiles(str(directory)).trajectories())
    assert len({record.key for record in found}) == len(found), "a trajectory is there twice"
    return found


def stored_lines(directory: Path) -> list[bytes]:
    """Lines of all shards as they are now, duplicates too; the last may be half written."""
    return [line for path in sorted(directory.glob("shard-*.jsonl")) for line in path.read_bytes().splitlines()]
