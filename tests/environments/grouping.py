"""An environment that compares the responses of a prompt group, as a pairwise reward model does."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kuberoll_workers.environments import EnvironmentReturn, GroupMember, GroupScore, UnusableRow

WAYS = ["up", "down", "left", "right"]


def last_response(messages: Sequence[Any]) -> str:
    return str([message["content"] for message in messages if message["role"] == "assistant"][-1])


class Tournament:
    """Each response meets all others of its group: the longer one, else the later one by alphabet, wins.

    A trajectory has `metadata.turns` turns, each worth 0.25. `metadata.trouble` is what `score_group` does: `raise`,
    `hang`, `exit`, `short`, `nan`, `text`, `unplain`, `huge`, `row`; only the first time in `directory` with `-once`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.directory = Path(config["directory"])

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        states = [{**state, "turns": state["turns"] - 1} for state in metadata]
        ends = [state["turns"] <= 0 for state in states]
        observations = [{"role": "environment", "content": "next"} for _ in states]
        return EnvironmentReturn(observations, states, None, [0.25] * len(ends), ends)

    def score_group(self, members: list[GroupMember]) -> Any:
        with (self.directory / "scored").open("a") as file:
            file.write(" ".join(member.id for member in members) + "\n")
        if (self.directory / "broken").exists():
            raise RuntimeError("broken")
        state = members[0].metadata or {}
        if (result := self.trouble(state.get("trouble", ""), len(members))) is not None:
            return result
        texts = [last_response(member.messages) for member in members]
        rank = [(len(text), text) for text in texts]
        scores: list[Any] = []
        for number, (member, own) in enumerate(zip(members, rank, strict=True)):
            points = sum(1.0 if own > other else 0.5 for other in rank if own >= other) - 0.5
            reward = points / max(1, len(members) - 1)
            kept = {**(member.metadata or {}), "points": points, "of": len(members)}
            scores.append(reward if number % 2 and state.get("plain") else GroupScore(reward=reward, metadata=kept))
        return scores

    def trouble(self, word: str, size: int) -> Any:
        if word.endswith("-once"):
            try:
                (self.directory / word).touch(exist_ok=False)
            except FileExistsError:
                return None
        command = word.removesuffix("-once")
        if command == "raise":
            raise ValueError("no judgement")
        if command == "row":
            raise UnusableRow("metadata.reference: missing")
        if command == "hang":
            time.sleep(3600)
        if command == "exit":
            os._exit(7)
        bad: dict[str, Any] = {
            "short": [1.0] * (size - 1),
            "nan": [1.0] * (size - 1) + [float("nan")],
            "text": ["much"] * size,
            "huge": [1e39] * size,
            "unplain": [GroupScore(reward=1.0, metadata={"a": {1}})] * size,
            "none": None,
        }
        return bad.get(command)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


class RestartedTournament(Tournament):
    """Episodes stay with their instance."""

    recovery = "restart"


class CoroutineTournament(Tournament):
    """Its methods are coroutine functions."""

    async def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:  # type: ignore[override]
        return super().step(message_log_batch, metadata)

    async def score_group(self, members: list[GroupMember]) -> Any:
        return super().score_group(members)
