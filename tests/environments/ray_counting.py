"""Environments as NeMo RL writes them: decorated with `@ray.remote`, with and without workers of their own."""

from __future__ import annotations

from typing import Any

import ray

from kuberoll_workers.environments import EnvironmentReturn


@ray.remote
class Counter:
    """A worker of an environment."""

    def count(self, text: str) -> float:
        return float(len(text.split()))


@ray.remote(max_restarts=-1, max_concurrency=4)
class CountingWords:
    """Its reward is the number of words, which its workers count."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.workers = [Counter.remote() for _ in range(cfg["num_workers"])]  # type: ignore[attr-defined]

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        counts = [
            self.workers[number % len(self.workers)].count.remote(log[-1]["content"])
            for number, log in enumerate(message_log_batch)
        ]
        size = len(message_log_batch)
        observations = [{"role": "environment", "content": "counted"}] * size
        return EnvironmentReturn(observations, metadata, [None] * size, ray.get(counts), [True] * size)

    def shutdown(self) -> None:
        for worker in self.workers:
            ray.kill(worker)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        ended = batch["rewards"] * batch["is_end"]
        return batch, {
            "words": ended.sum().item(),
            "total": batch["total_reward"].to(batch["rewards"].dtype).sum().item(),
            "prompts": batch["text"].shape[0],
            "generated": (batch["generation_lengths"] - batch["prompt_lengths"]).sum().item(),
        }
