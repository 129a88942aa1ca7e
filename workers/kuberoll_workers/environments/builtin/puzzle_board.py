"""Board of a sliding puzzle: pure functions on rows of numbered tiles, 0 being the gap."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from kuberoll_workers.environments.interface import UnusableRow

Board = tuple[tuple[int, ...], ...]

# Position of the sliding tile relative to the gap: "up" moves the tile below the gap upward.
SLIDES: Mapping[str, tuple[int, int]] = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
OPPOSITE: Mapping[str, str] = {"up": "down", "down": "up", "left": "right", "right": "left"}


def solved_board(rows: int, cols: int) -> Board:
    """The goal: tiles in reading order from 1, with the gap last."""
    tiles = [*range(1, rows * cols), 0]
    return tuple(tuple(tiles[row * cols : (row + 1) * cols]) for row in range(rows))


def is_solved(board: Board) -> bool:
    return board == solved_board(len(board), len(board[0]))


def slide(board: Board, direction: str) -> Board | None:
    """The board after a tile slid in this direction into the gap; None if no tile can."""
    row, col = _gap(board)
    down, across = SLIDES[direction]
    tile_row, tile_col = row + down, col + across
    if not (0 <= tile_row < len(board) and 0 <= tile_col < len(board[0])):
        return None
    cells = [list(cells_of_row) for cells_of_row in board]
    cells[row][col], cells[tile_row][tile_col] = cells[tile_row][tile_col], 0
    return tuple(map(tuple, cells))


def shuffled(rows: int, cols: int, most_moves: int, draw: random.Random) -> Board:
    """A solvable, unsolved board: 1 to `most_moves` random slides away from the goal, none undoing the one before.

    The number of slides is random, too. With a fixed one, a 2×2 puzzle, whose 12 states form a ring, would have only
    two different boards.
    """
    goal = solved_board(rows, cols)
    while True:
        board, last = goal, ""
        for _ in range(draw.randint(1, most_moves)):
            onward = {
                direction: moved
                for direction in SLIDES
                if OPPOSITE[direction] != last and (moved := slide(board, direction)) is not None
            }
            last = draw.choice(list(onward))
            board = onward[last]
        if board != goal:
            return board


def render(board: Board) -> str:
    """One line per row, each ending with a newline; `_` is the gap; columns are as wide as the widest tile."""
    width = len(str(len(board) * len(board[0]) - 1))
    lines = (" ".join((str(tile) if tile else "_").rjust(width) for tile in row) for row in board)
    return "".join(f"{line}\n" for line in lines)


def parse_board(value: Any) -> Board:
    """A board from its JSON form, a list of rows.

    Raises:
        UnusableRow: It is not a rectangle that holds each number from 0 exactly once.
    """
    rows = value if isinstance(value, list) else []
    tiles = [tile for row in rows if isinstance(row, list) for tile in row]
    rectangular = rows and all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows)
    numbers = all(isinstance(tile, int) and not isinstance(tile, bool) for tile in tiles)
    if not rectangular or not numbers or len(tiles) < 2 or sorted(tiles) != list(range(len(tiles))):
        raise UnusableRow(
            f"metadata.board: found {str(value)[:80]}; it must be a list of equally long rows that hold each number "
            "from 0 (the gap) once, as in [[1, 2], [3, 0]]"
        )
    return tuple(map(tuple, rows))


def _gap(board: Board) -> tuple[int, int]:
    return next((row, cells.index(0)) for row, cells in enumerate(board) if 0 in cells)
