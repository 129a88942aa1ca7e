"""An environment whose turns, observations and seconds are drawn from what has been said."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from kuberoll_workers.environments import EnvironmentInterface, EnvironmentReturn

WORDS = ("go", "on", "with", "the", "next", "part", "of", "it")


class Drawn(EnvironmentInterface[dict[str, int]]):
    """Goes on for a mean of `turns` turns, at most 8; observations have a median of `words` words."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._turns, self._words = float(config["turns"]), float(config["words"])
        self._seconds = float(config["seconds"])

    async def step(
        self, messages: Sequence[list[dict[str, Any]]], metadata: Sequence[dict[str, int] | None]
    ) -> EnvironmentReturn[dict[str, int]]:
        [log], [state] = messages, metadata
        draw = random.Random(" ".join(message["content"] for message in log))
        await asyncio.sleep(self._seconds * draw.lognormvariate(0.0, 1.0))
        turn = 1 + (state or {}).get("turn", 0)
        count = max(1, min(120, round(self._words * draw.lognormvariate(0.0, 0.6))))
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": " ".join(draw.choices(WORDS, k=count))}],
            metadata=[{"turn": turn}],
            next_stop_strings=None,
            rewards=[1.0],
            terminateds=[turn == 8 or draw.random() < 1 / self._turns],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        return batch, {}
