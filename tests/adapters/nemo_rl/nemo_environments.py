"""Environments in the shape that NeMo RL's own have: typed states, batches of logs, six elements, tensors."""

from __future__ import annotations

import operator
import re
from typing import Any, TypedDict

import torch

from kuberoll_workers.environments import EnvironmentInterface, EnvironmentReturn

CALL = "<call: calculator>"
_OPERATIONS = {"sum": operator.add, "diff": operator.sub, "prod": operator.mul, "div": operator.truediv}
_SLIDES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}


class CalculatorState(TypedDict):
    problem: str
    expected_final_answer: float
    max_steps: int
    current_step: int


class PuzzleState(TypedDict):
    grid: list[list[int]]
    num_moves: int
    max_moves: int


class _Turn(TypedDict):
    observation: str
    state: Any
    stops: list[str] | None
    reward: float
    terminated: bool


def _batch(turns: list[_Turn]) -> EnvironmentReturn:
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": turn["observation"]} for turn in turns],
        metadata=[turn["state"] for turn in turns],
        next_stop_strings=[turn["stops"] for turn in turns],
        rewards=torch.tensor([turn["reward"] for turn in turns], dtype=torch.float32),
        terminateds=torch.tensor([turn["terminated"] for turn in turns], dtype=torch.bool),
        answers=[None] * len(turns),
    )


def _over(observation: str, reward: float = 0.0) -> _Turn:
    return _Turn(observation=observation, state=None, stops=None, reward=reward, terminated=True)


class MultiStepCalculator(EnvironmentInterface):
    """`[a, b, sum]<call: calculator>` is answered by its result, a number ends the episode."""

    def step(self, message_log_batch: list[Any], metadata_batch: list[Any]) -> EnvironmentReturn:
        pairs = zip(message_log_batch, metadata_batch, strict=True)
        return _batch([self._turn(log[-1]["content"].strip(), state) for log, state in pairs])

    def _turn(self, text: str, state: CalculatorState) -> _Turn:
        if state["current_step"] >= state["max_steps"]:
            return _over("<error>no step is left")
        called = re.fullmatch(r"\[(.+), (.+), (sum|diff|prod|div)\]" + re.escape(CALL), text)
        if called is None:
            right = float(text) == state["expected_final_answer"]
            return _over("right" if right else "wrong", float(right))
        result = _OPERATIONS[called[3]](float(called[1]), float(called[2]))
        return _Turn(
            observation=f"<result>{result:.5f}</result>",
            state=CalculatorState(**{**state, "current_step": state["current_step"] + 1}),
            stops=[CALL],
            reward=0.0,
            terminated=False,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {"success_rate": batch["total_reward"].mean().item()}


class SlidingPuzzle(EnvironmentInterface):
    """`<action>up</action>` slides a tile; a reply without an action gets the board, and no new state."""

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        pairs = zip(message_log_batch, metadata, strict=True)
        return _batch([self._turn(log[-1]["content"], state) for log, state in pairs])

    def _turn(self, text: str, state: PuzzleState) -> _Turn:
        if state["num_moves"] >= state["max_moves"]:
            return _over("<environment>no move is left</environment>\n")
        action = re.search(r"<action>(\w+)</action>", text)
        grid = [row[:] for row in state["grid"]]
        if action is None:
            return _shown(grid, None)
        row, column = next((r, c) for r, line in enumerate(grid) for c, tile in enumerate(line) if tile == 0)
        down, right = _SLIDES[action[1]]
        if 0 <= row + down < len(grid) and 0 <= column + right < len(grid):
            grid[row][column], grid[row + down][column + right] = grid[row + down][column + right], 0
        if grid == [[1, 2], [3, 0]]:
            return _over("<environment>solved</environment>\n", 1.0)
        moves = state["num_moves"] + 1
        return _shown(grid, PuzzleState(grid=grid, num_moves=moves, max_moves=state["max_moves"]))

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {"success_rate": (batch["total_reward"] == 1.0).float().mean().item()}


def _shown(grid: list[list[int]], state: PuzzleState | None) -> _Turn:
    board = "/".join(" ".join(map(str, row)) for row in grid)
    observation = f"<environment>{board}</environment>\n"
    return _Turn(observation=observation, state=state, stops=["</action>"], reward=0.0, terminated=False)
