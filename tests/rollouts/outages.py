"""Environments whose service is out: while there is a file `out-TURN` in `directory`, that turn cannot be taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from kuberoll_workers.environments import EnvironmentReturn, Episode, EpisodeStart


class Rooms:
    """Three turns; its state is in the metadata."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.directory = Path(config["directory"])
        # A word in a second response that is never taken.
        self.broken = config.get("broken")

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        for log, state in zip(message_log_batch, metadata, strict=True):
            if state.get("turn") == 1 and self.broken is not None and self.broken in log[-1]["content"]:
                raise ValueError("a bug")
        turns = [state.get("turn", 0) + 1 for state in metadata]
        for turn in turns:
            if (self.directory / f"out-{turn}").exists():
                raise ConnectionError("the service is out")
        states = [{**state, "turn": turn} for state, turn in zip(metadata, turns, strict=True)]
        observations = [{"role": "environment", "content": f"room {turn}"} for turn in turns]
        return EnvironmentReturn(
            observations, states, None, [float(turn) for turn in turns], [turn == 3 for turn in turns]
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


class ReplayedRooms(Rooms):
    """Its episodes are made again from their turns."""

    recovery: ClassVar[str] = "replay"

    def reset(self, episodes: list[Episode]) -> list[EpisodeStart]:
        return [EpisodeStart(metadata={**(episode.metadata or {}), "reset": True}) for episode in episodes]


class ClosedRooms(ReplayedRooms):
    """Each attempt closes its episode."""

    def close(self, episodes: list[Any]) -> None:
        for episode in episodes:
            (self.directory / f"closed-{episode.id}").touch()


class RestartedRooms(ReplayedRooms):
    recovery: ClassVar[str] = "restart"
