"""An environment that is decorated with `@ray.remote` and starts no workers."""

from __future__ import annotations

from typing import Any

import ray

from kuberoll_workers.environments import EnvironmentReturn


class Base:
    """A plain base class."""

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


@ray.remote
class Alone(Base):
    """Rewards everything."""

    def __init__(self, cfg: dict[str, Any] | None = None) -> None:
        self.reward = (cfg or {}).get("reward", 1.0)

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        size = len(message_log_batch)
        observations = [{"role": "environment", "content": "seen"}] * size
        return EnvironmentReturn(observations, metadata, None, [self.reward] * size, [True] * size)
