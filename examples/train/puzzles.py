"""Make the puzzles of this example: `train.jsonl`, and `held-out.jsonl` with boards that no training starts from.

    python examples/train/puzzles.py

Every 2×3 board from one to eight moves away from its goal is in one of the two files, once. Of boards that are
equally far every fourth is held out, so that both files are equally hard.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_policy.experts import shortest_moves

from kuberoll_workers.environments.builtin.puzzle_board import Board, parse_board, slide, solved_board
from kuberoll_workers.environments.builtin.sliding_puzzle import SlidingPuzzleEnvironment

HERE = Path(__file__).parent
ROWS, COLS, FARTHEST = 2, 3, 8
CONFIG = {"rows": ROWS, "cols": COLS, "shuffleMoves": FARTHEST, "maxMoves": 10}
DRAWN = 20_000
"""Puzzles that the environment is asked for: far more than there are different ones."""
HELD_OUT = 4
"""One of so many boards is held out."""


def split() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on, and those held out."""
    drawn = SlidingPuzzleEnvironment(CONFIG).generate_dataset(DRAWN, seed=0)
    different = {parse_board(row["metadata"]["board"]): row for row in drawn}
    boards = sorted(different)
    random.Random(0).shuffle(boards)
    boards.sort(key=moves_to_goal)
    rows = [different[board] for board in boards]
    held_out = rows[HELD_OUT - 1 :: HELD_OUT]
    return [row for row in rows if row not in held_out], held_out


def moves_to_goal(board: Board) -> int:
    """Length of a shortest way."""
    best = shortest_moves(ROWS, COLS)
    moves = 0
    while board != solved_board(ROWS, COLS):
        moved = slide(board, best[board])
        assert moved is not None
        board, moves = moved, moves + 1
    return moves


def main() -> None:
    for name, rows in zip(("train.jsonl", "held-out.jsonl"), split(), strict=True):
        lines = [json.dumps({**row, "idx": index}) for index, row in enumerate(rows)]
        (HERE / name).write_text("".join(f"{line}\n" for line in lines))
        print(f"{name}: {len(rows)} puzzles")


if __name__ == "__main__":
    main()
