"""A worker in a process of its own, to be killed: imported by the process that it is forked from."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import transformers.models.auto.tokenization_auto  # noqa: F401 - so that not every child has to

from kuberoll_api.rolloutjob import SimulatedEngine
from kuberoll_workers.policy.engines.simulated import Simulated
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker import Progress, WorkerConfig, work

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
    config = WorkerConfig(
        job=document,
        base="/",
        tokenizer=str(TINY),
        endpoint="",
        max_model_len=512,
        output=output,
        turns=turns,
        shards=list(range(SHARDS)),
        shard_count=SHARDS,
    )
    asyncio.run(_run(config, seconds))


async def _run(config: WorkerConfig, seconds: float) -> None:
    engine = Simulated(
        model="none",
        tokenizer=str(TINY),
        settings=SimulatedEngine.model_validate({"responses": WAYS, "firstTokenSeconds": seconds, "sigma": 1.0}),
        engine_args={"max_model_len": 512},
    )
    await engine.start()
    await work(config, metrics=RolloutMetrics("crash"), drain=Drain(), progress=Progress(), policy=engine)
