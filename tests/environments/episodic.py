"""Environments with episodes, which write down what they are called for, and do what the policy tells them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kuberoll_workers.environments import EnvironmentReturn, Episode, EpisodeEnd, EpisodeStart, UnusableRow


class Event(NamedTuple):
    """A call of an environment in a process; `episode` and `detail` are empty where there are none."""

    process: int
    method: str
    episode: str
    detail: str


def events_in(directory: Path) -> list[Event]:
    """Calls in the order in which they were made, over all processes."""
    path = directory / "events"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Event(int(process), *rest) for process, *rest in (line.split("|") for line in lines)]


def unclosed(events: Sequence[Event], *, dead: Sequence[int] = (), anywhere: bool = False) -> list[Event]:
    """Resets without exactly one later close in the same process, or anywhere; except in processes that died."""
    open_episodes: dict[tuple[int, str], Event] = {}
    wrong: list[Event] = []
    for event in events:
        key = (0 if anywhere else event.process, event.episode)
        if event.method == "reset":
            if key in open_episodes:
                wrong.append(event)
            open_episodes[key] = event
        elif event.method == "close" and open_episodes.pop(key, None) is None:
            wrong.append(event)
    return wrong + [event for (process, _), event in open_episodes.items() if process not in dead]


class Rooms:
    """Counts the steps of each episode in an object; an episode ends with its third step, or with the reply `end`.

    Replies: `crash`, `hang` and `raise` do so, but only the first time in the directory if they end in `-once`.
    """

    recovery = "replay"

    def __init__(self, config: dict[str, Any]) -> None:
        self.directory = Path(config["directory"])
        self.steps: dict[str, int] = {}

    def note(self, method: str, episode: str = "", detail: str = "") -> None:
        with (self.directory / "events").open("a") as file:
            file.write(f"{os.getpid()}|{method}|{episode}|{detail}\n")

    def reset(self, episodes: list[Episode]) -> list[EpisodeStart | None]:
        starts: list[EpisodeStart | None] = []
        for episode in episodes:
            self.note("reset", episode.id, str(episode.seed))
        for episode in episodes:
            row = episode.metadata or {}
            self.obey(row.get("reset", ""))
            if row.get("reset") == "unusable":
                raise UnusableRow("this row is not for rooms")
            self.steps[episode.id] = 0
            starts.append(
                EpisodeStart(
                    messages=[{"role": "user", "content": f"room {episode.seed}"}],
                    metadata={**row, "room": episode.id},
                    stop_strings=["!"],
                )
            )
        return starts

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        observations, ends = [], []
        for log, state in zip(logs, metadata, strict=True):
            self.steps[state["room"]] += 1
            self.note("step", state["room"], log[-1]["content"])
            self.obey(log[-1]["content"])
            count = self.steps[state["room"]]
            observations.append({"role": "environment", "content": f"step {count}"})
            ends.append(count == 3 or log[-1]["content"] == "end")
        return EnvironmentReturn(observations, None, None, [1.0] * len(ends), ends)

    def close(self, episodes: list[EpisodeEnd]) -> None:
        for episode in episodes:
            self.note("close", episode.id, episode.reason)
            assert episode.metadata is not None
            self.obey(episode.metadata.get("close", ""))
            self.steps.pop(episode.id, None)

    def shutdown(self) -> None:
        self.note("shutdown")

    def obey(self, word: str) -> None:
        if word.endswith("-once"):
            try:
                (self.directory / word).touch(exist_ok=False)
            except FileExistsError:
                return
        command = word.removesuffix("-once").rstrip("0123456789")
        if command == "crash":
            self.note("crash")
            os._exit(3)
        if command == "hang":
            self.note("hang")
            time.sleep(3600)
        if command == "raise":
            raise ValueError("told to")

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


class ShakyRooms(Rooms):
    """The second reset in the directory raises an exception."""

    def reset(self, episodes: list[Episode]) -> list[EpisodeStart | None]:
        starts = super().reset(episodes)
        if sum(event.method == "reset" for event in events_in(self.directory)) == 2:
            raise ValueError("not now")
        return starts


class RestartedShakyRooms(ShakyRooms):
    """It cannot be replayed."""

    recovery = "restart"


class RestartedRooms(Rooms):
    recovery = "restart"


class GatedRooms(Rooms):
    """A step waits until there is a file `go` in the directory."""

    def obey(self, word: str) -> None:
        while word == "go" and not (self.directory / "go").exists():
            time.sleep(0.01)
        super().obey(word)


class PlainRooms(Rooms):
    """Keeps its state in the metadata."""

    recovery = "metadata"

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        for log, state in zip(logs, metadata, strict=True):
            self.note("step", state["room"], log[-1]["content"])
            self.obey(log[-1]["content"])
        states = [{**state, "steps": state.get("steps", 0) + 1} for state in metadata]
        ends = [state["steps"] == 3 or log[-1]["content"] == "end" for log, state in zip(logs, states, strict=True)]
        observations = [{"role": "environment", "content": f"step {state['steps']}"} for state in states]
        return EnvironmentReturn(observations, states, None, [1.0] * len(ends), ends)


class CoroutineRooms(Rooms):
    """All of its methods are coroutine functions."""

    recovery = "restart"

    async def reset(self, episodes: list[Episode]) -> list[EpisodeStart | None]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(episodes)

    async def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(logs, metadata)

    async def close(self, episodes: list[EpisodeEnd]) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().close(episodes)

    async def shutdown(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().shutdown()


class ForgetfulRooms(Rooms):
    """Observes another text each time, so that nothing can be replayed."""

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        answer = super().step(logs, metadata)
        texts = [{"role": "environment", "content": f"at {time.time_ns()}"} for _ in logs]
        return answer._replace(observations=texts)
