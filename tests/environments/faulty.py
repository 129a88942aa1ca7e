"""Environments with episodes whose processes crash or hang in the steps of some trajectories, at every try."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from kuberoll_workers.environments import EnvironmentReturn, Episode, EpisodeEnd, EpisodeStart

STEPS = 3


class Faulty:
    """Episodes of three steps; with `every`, the episode of each such step of all its processes has the fault.

    Config: `directory` of its notes; `fault`, `crash` or `hang`; `every`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.directory = Path(config["directory"])
        self.fault, self.every = config.get("fault", ""), config.get("every", 0)

    def note(self, method: str, episode: str, detail: str = "") -> None:
        with (self.directory / "events").open("a") as file:
            file.write(f"{os.getpid()}|{method}|{episode}|{detail}\n")

    def reset(self, episodes: list[Episode]) -> list[EpisodeStart]:
        starts = []
        for episode in episodes:
            self.note("reset", episode.id)
            starts.append(EpisodeStart(metadata={"episode": episode.id, "steps": 0}))
        return starts

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        for state in metadata:
            if self.every and self.has_fault(state["episode"]):
                self.note(self.fault, state["episode"])
                if self.fault == "crash":
                    os._exit(3)
                time.sleep(3600)
        states = [{**state, "steps": state["steps"] + 1} for state in metadata]
        observations = [{"role": "environment", "content": f"step {state['steps']}"} for state in states]
        ends = [state["steps"] == STEPS for state in states]
        return EnvironmentReturn(observations, states, None, [1.0] * len(ends), ends)

    def has_fault(self, episode: str) -> bool:
        """Count a step; True if the episode has the fault from now on, or had it before."""
        with (self.directory / "steps").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            lines = file.read().splitlines()
            chosen = f"fault {episode}" in lines
            if not chosen:
                chosen = (sum(not line.startswith("fault") for line in lines) + 1) % self.every == 0
                file.write(f"{episode}\n" + (f"fault {episode}\n" if chosen else ""))
            return chosen

    def close(self, episodes: list[EpisodeEnd]) -> None:
        for episode in episodes:
            self.note("close", episode.id, episode.reason)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


def faulty_episodes(directory: Path) -> set[str]:
    """Episodes that have the fault."""
    lines = (directory / "steps").read_text().splitlines()
    return {line.removeprefix("fault ") for line in lines if line.startswith("fault ")}
