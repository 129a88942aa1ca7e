"""Map of a grid world: pure functions on rows of letters.

The letters are those of Gymnasium's FrozenLake, and `#`: S the start, F free, H a hole, G the goal, # a wall.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kuberoll_workers.environments.interface import UnusableRow

Cell = tuple[int, int]
"""Row and column, from 0."""

MOVES: Mapping[str, Cell] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Rows and columns that each move adds; neighbors in this order, as a circle, are at right angles."""
SYMBOLS: Mapping[str, str] = {"S": ".", "F": ".", "H": "O", "G": "G", "#": "#"}
"""Letters as the policy sees them; its own cell is `@`."""
MAX_SIDE = 50
_ATTEMPTS = 100


def moved(grid: Sequence[str], cell: Cell, move: str) -> Cell:
    """The cell after a move: the same one at a wall or the edge."""
    row, col = cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
    inside = 0 <= row < len(grid) and 0 <= col < len(grid[0])
    return (row, col) if inside and grid[row][col] != "#" else cell


def slips(move: str, success_rate: float) -> list[tuple[float, str]]:
    """Moves that a move on slippery ground may become, with their probabilities: itself, and those at right angles."""
    order = list(MOVES)
    at = order.index(move)
    aside = (1 - success_rate) / 2
    return [(aside, order[at - 1]), (success_rate, move), (aside, order[(at + 1) % len(order)])]


def shortest_way(grid: Sequence[str], start: Cell) -> list[str] | None:
    """Moves of a shortest way to the goal past the holes, by breadth-first search; None if there is none."""
    came: dict[Cell, tuple[Cell, str] | None] = {start: None}
    frontier = deque([start])
    while frontier:
        cell = frontier.popleft()
        if grid[cell[0]][cell[1]] == "G":
            way = []
            while (step := came[cell]) is not None:
                cell, move = step
                way.append(move)
            return way[::-1]
        for move in MOVES:
            after = moved(grid, cell, move)
            if after not in came and grid[after[0]][after[1]] != "H":
                came[after] = (cell, move)
                frontier.append(after)
    return None


def generated(rows: int, cols: int, *, holes: float, walls: float, draw: random.Random) -> list[str]:
    """A random map whose goal can be reached; without holes and walls if many attempts find none.

    Args:
        holes: Share of cells that are holes.
        walls: Share of cells that are walls.
    """
    cells = [(row, col) for row in range(rows) for col in range(cols)]
    for attempt in range(_ATTEMPTS + 1):
        start, goal = draw.sample(cells, 2)
        letters = {
            cell: "F" if attempt == _ATTEMPTS else "H" if chance < holes else "#" if chance < holes + walls else "F"
            for cell in cells
            for chance in [draw.random()]
        } | {start: "S", goal: "G"}
        grid = ["".join(letters[row, col] for col in range(cols)) for row in range(rows)]
        if shortest_way(grid, start) is not None:
            return grid
    raise AssertionError("an empty map has a way")


def render(grid: Sequence[str], cell: Cell) -> str:
    """One line per row, each ending with a newline; `@` is the policy's cell."""
    lines = (
        " ".join("@" if (row, col) == cell else SYMBOLS[letter] for col, letter in enumerate(letters))
        for row, letters in enumerate(grid)
    )
    return "".join(f"{line}\n" for line in lines)


def parse_grid(value: Any) -> list[str]:
    """A map from its JSON form, a list of texts.

    Raises:
        UnusableRow: It is not a rectangle of these letters with a start.
    """
    rows = value if isinstance(value, list) and all(isinstance(row, str) for row in value) else []
    wide = {len(row) for row in rows}
    letters = "".join(rows)
    if (
        len(wide) != 1
        or not 1 <= max(*wide, len(rows)) <= MAX_SIDE
        or not set(letters) <= set(SYMBOLS)
        or letters.count("S") != 1
        or "G" not in letters
    ):
        raise UnusableRow(
            f"metadata.grid: found {str(value)[:80]}; it must be a list of at most {MAX_SIDE} equally long texts of "
            f"at most {MAX_SIDE} letters: one S (start), F (free), H (hole), at least one G (goal), # (wall)"
        )
    return list(rows)


def start_of(grid: Sequence[str]) -> Cell:
    """The cell of the letter S."""
    return next((row, letters.index("S")) for row, letters in enumerate(grid) if "S" in letters)
