"""Experts that play the built-in environments, with a little noise: what the tiny policy learns from.

An expert is a generator: it yields a reply and is sent the environment's observation.
"""

from __future__ import annotations

import functools
import random
import re
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any

from kuberoll_workers.environments.builtin.puzzle_board import OPPOSITE, SLIDES, Board, parse_board, slide, solved_board

Expert = Generator[str, str, None]
ExpertMaker = Callable[[Mapping[str, Any], random.Random], Expert]

RANDOM_MOVE = 0.12
"""Part of the puzzle's moves that are drawn at random. The policy learns them too, so it errs and recovers."""
SLIP = 0.03
"""Part of the calculator's calls with a wrong operand, made again correctly in the next turn."""
HASTE = 0.04
"""Part of the calculator's turns, after the first, in which the newest result is passed off as the answer."""


def puzzle_expert(metadata: Mapping[str, Any], draw: random.Random) -> Expert:
    """Slides along a shortest way, except for random moves."""
    board = parse_board(metadata["board"])
    best = shortest_moves(len(board), len(board[0]))
    while True:
        move = draw.choice(list(SLIDES)) if draw.random() < RANDOM_MOVE else best[board]
        yield f"<action>{move}</action>"
        board = slide(board, move) or board


@functools.cache
def shortest_moves(rows: int, cols: int) -> Mapping[Board, str]:
    """For every solvable, unsolved board a move on a shortest way to the goal; for small boards only."""
    goal = solved_board(rows, cols)
    best: dict[Board, str] = {goal: ""}
    frontier = deque([goal])
    while frontier:
        board = frontier.popleft()
        for move in SLIDES:
            before = slide(board, move)
            if before is not None and before not in best:
                best[before] = OPPOSITE[move]
                frontier.append(before)
    del best[goal]
    return best


_INNERMOST = re.compile(r"\(([^()]*)\)")
_RESULT = re.compile(r"<result>(.*?)</result>")


def calculator_expert(metadata: Mapping[str, Any], draw: random.Random) -> Expert:
    """Calls the innermost operation until a number is left, except for slips and hasty answers."""
    rest, newest = str(metadata["problem"]), None
    while " " in rest:
        if newest is not None and draw.random() < HASTE:
            yield f"<answer>{newest}</answer>"
        bracket = _INNERMOST.search(rest)
        operation = bracket[1] if bracket else rest
        slip = draw.random() < SLIP
        observation = yield f"<call>{_slipped(operation, draw) if slip else operation}</call>"
        result = _RESULT.search(observation)
        if not slip and result is not None:
            newest = result[1]
            rest = rest.replace(f"({operation})" if bracket else operation, newest, 1)
    yield f"<answer>{rest}</answer>"


def _slipped(operation: str, draw: random.Random) -> str:
    left, symbol, _ = operation.rsplit(" ", 2)
    return f"{left} {symbol} {draw.randint(1, 20)}"
