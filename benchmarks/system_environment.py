"""An environment of so many turns, each of which takes so long, and that says the same each time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from kuberoll_workers.environments import EnvironmentInterface, EnvironmentReturn


class Turns(EnvironmentInterface[dict[str, int]]):
    """Ends after `turns` turns; a step takes `seconds`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._turns, self._seconds = int(config["turns"]), float(config["seconds"])

    async def step(
        self, messages: Sequence[list[dict[str, Any]]], metadata: Sequence[dict[str, int] | None]
    ) -> EnvironmentReturn[dict[str, int]]:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        numbers = [1 + (state or {}).get("turn", 0) for state in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "go on with the next part of it "} for _ in messages],
            metadata=[{"turn": number} for number in numbers],
            next_stop_strings=[None] * len(messages),
            rewards=[1.0] * len(messages),
            terminateds=[number >= self._turns for number in numbers],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        return batch, {}
