"""Conversations of the experts with the real environments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kuberoll_workers.environments.builtin.calculator import CalculatorEnvironment
from kuberoll_workers.environments.builtin.sliding_puzzle import SlidingPuzzleEnvironment
from kuberoll_workers.environments.interface import ChatMessage, EnvironmentInterface
from tiny_policy.experts import ExpertMaker, calculator_expert, puzzle_expert


@dataclass(frozen=True, slots=True)
class Task:
    """One environment, how it is configured, and the share of the episodes that it gets."""

    environment: EnvironmentInterface
    expert: ExpertMaker
    share: float


def training_tasks() -> list[Task]:
    """What the policy is trained on: 2×2 puzzles of several lengths, and calculations of one to three steps."""
    puzzle = {"size": 2, "shuffleMoves": 10}
    return [
        *(Task(SlidingPuzzleEnvironment({**puzzle, "maxMoves": n}), puzzle_expert, 0.075) for n in (6, 8, 12, 20)),
        Task(CalculatorEnvironment({"steps": 2}), calculator_expert, 0.48),
        Task(CalculatorEnvironment({"steps": 1}), calculator_expert, 0.06),
        Task(CalculatorEnvironment({"steps": 3}), calculator_expert, 0.06),
        # Large numbers cannot be learned by heart: they have to be copied.
        Task(CalculatorEnvironment({"steps": 2, "maxOperand": 999}), calculator_expert, 0.1),
    ]


def play_all(tasks: list[Task], count: int, seed: int) -> Iterator[list[ChatMessage]]:
    """About `count` episodes, the same for the same seed; each a chat from the prompt to the last reply."""
    for number, task in enumerate(tasks):
        draw = random.Random(f"{seed}-{number}")
        for row in task.environment.generate_dataset(round(count * task.share), draw.getrandbits(32)):
            yield play(task, row, draw)


def play(task: Task, row: dict[str, Any], draw: random.Random) -> list[ChatMessage]:
    """One episode."""
    log: list[ChatMessage] = list(row["messages"])
    metadata = row["metadata"]
    expert = task.expert(metadata, draw)
    reply = next(expert)
    while True:
        log.append({"role": "assistant", "content": reply})
        result = task.environment.step([log], [metadata])
        if result.terminateds[0]:
            return log
        metadata = result.metadata[0]
        observation = dict(result.observations[0])
        log.append(observation)
        reply = expert.send(observation["content"])
