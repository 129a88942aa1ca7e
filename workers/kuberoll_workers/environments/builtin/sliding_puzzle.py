"""Sliding puzzle: order numbered tiles by sliding them into the gap, one move per turn."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from kuberoll_workers.environments.builtin import puzzle_board
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.turn import Turn, TurnEnvironment, count_of, first_tagged, mean, quoted
from kuberoll_workers.environments.interface import Metadata, ScoringCase

STOP_STRINGS = ("</action>",)
_VIEW = "view"


class SlidingPuzzleConfig(EnvironmentConfig):
    """Size and difficulty of the puzzles."""

    size: int | None = Field(default=None, ge=2, le=10, description="Rows and columns of a square board; default 3.")
    rows: int | None = Field(default=None, ge=2, le=10, description="Rows of a board that is not square.")
    cols: int | None = Field(default=None, ge=2, le=10, description="Columns of a board that is not square.")
    shuffle_moves: int = Field(
        default=20, ge=1, le=10_000, description="Maximum number of slides that shuffle a board."
    )
    max_moves: int = Field(
        default=30, ge=1, le=100_000, description="Maximum number of turns, after which the episode ends unsolved."
    )

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if (self.rows is None) != (self.cols is None):
            raise ValueError("rows and cols belong together: set both, or size alone")
        if self.size is not None and self.rows is not None:
            raise ValueError("size excludes rows and cols")
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        if self.rows is not None and self.cols is not None:
            return self.rows, self.cols
        return self.size or 3, self.size or 3


class SlidingPuzzleEnvironment(TurnEnvironment):
    """The policy writes `<action>up</action>`; the environment slides a tile and shows the board.

    `up`, `down`, `left` and `right` name the direction in which a tile slides into the gap; `view` only shows the
    board. The reward is 1 in the turn that solves the puzzle. Every turn counts as a move, even a malformed one. The
    limit is checked after the move, so reaching it costs no further generation.

    Episode state: `board` (rows of tiles, 0 the gap), `moves` (turns used), `solved`.
    """

    row_metadata: ClassVar[Mapping[str, str]] = {
        "board": "rows of tiles, 0 the gap",
        "moves": "turns used so far, 0 if absent",
    }
    scoring_cases: ClassVar[Sequence[ScoringCase]] = [
        ScoringCase(row={"metadata": {"board": board}}, responses=[response], reward=reward)
        for board, response, reward in [
            ([[1, 2], [3, 0]], "<action>view</action>", 1.0),
            ([[1, 2], [0, 3]], "<action>left</action>", 1.0),
            ([[1, 2], [0, 3]], "The tile 3 must go left: <action> LEFT </action>", 1.0),
            ([[1, 0], [3, 2]], "<action>up</action>", 1.0),
            ([[1, 2, 3], [4, 5, 0]], "<action>view</action>", 1.0),
            ([[1, 2], [0, 3]], "<action>right</action>", 0.0),
            ([[1, 2], [0, 3]], "<action>up</action>", 0.0),
            ([[1, 2], [0, 3]], "<action>left", 0.0),
            ([[1, 2], [0, 3]], "left", 0.0),
            ([[1, 2], [0, 3]], "<action>down</action><action>left</action>", 0.0),
        ]
    ]

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(SlidingPuzzleConfig, config)

    def check_row(self, metadata: Metadata) -> None:
        """
        Raises:
            UnusableRow: The row has no valid board.
        """
        _state_of(metadata or {})

    def turn(self, reply: str, state: dict[str, Any]) -> Turn:
        """See `TurnEnvironment.turn`."""
        before, made = _state_of(state)
        board, note = _move(reply, before)
        moves = made + 1
        solved = puzzle_board.is_solved(board)
        shown = f"{note}\n" if note else ""
        observation = f"\n{shown}{puzzle_board.render(board)}"
        if solved:
            observation += f"Solved in {moves} {'turn' if moves == 1 else 'turns'}.\n"
        elif moves >= self._config.max_moves:
            observation += "No turns are left.\n"
        over = solved or moves >= self._config.max_moves
        return Turn(
            observation=observation,
            metadata={**state, "board": [list(row) for row in board], "moves": moves, "solved": solved},
            reward=1.0 if solved else 0.0,
            terminated=over,
            stop_strings=None if over else STOP_STRINGS,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `solve_rate`, and, if any puzzle was solved, `mean_moves_of_solved`."""
        states = [state or {} for state in batch["extra_env_info"]]
        moves = [state["moves"] for state in states if state.get("solved")]
        metrics = {
            "episodes": len(states),
            "solve_rate": len(moves) / len(states) if states else None,
            "mean_moves_of_solved": mean(moves),
        }
        return batch, {name: value for name, value in metrics.items() if value is not None}

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with solvable, unsolved boards; a longer dataset of the same seed starts with the shorter one."""
        draw = random.Random(seed)
        rows, cols = self._config.shape
        boards = (puzzle_board.shuffled(rows, cols, self._config.shuffle_moves, draw) for _ in range(count))
        return [self._row(index, board) for index, board in enumerate(boards)]

    def _row(self, index: int, board: puzzle_board.Board) -> dict[str, Any]:
        rows, cols = self._config.shape
        prompt = (
            "Slide the tiles until they stand in this order, with the gap (_) last:\n"
            f"{puzzle_board.render(puzzle_board.solved_board(rows, cols))}"
            "Each turn, write one move: <action>up</action>, <action>down</action>, <action>left</action> or "
            "<action>right</action>. The tile beside the gap slides in that direction. "
            f"You have {self._config.max_moves} turns.\n"
            f"The board is:\n{puzzle_board.render(board)}"
        )
        return {
            "messages": [{"role": "user", "content": prompt}],
            "metadata": {"board": [list(row) for row in board], "moves": 0},
            "stop_strings": list(STOP_STRINGS),
            "idx": index,
        }


def _state_of(state: Mapping[str, Any]) -> tuple[puzzle_board.Board, int]:
    """The board, and the number of moves so far."""
    return puzzle_board.parse_board(state.get("board")), count_of(state, "moves")


def _move(reply: str, board: puzzle_board.Board) -> tuple[puzzle_board.Board, str]:
    """The board after the policy's reply, and a note to the policy if nothing moved."""
    tagged = first_tagged(reply, ["action"])
    if tagged is None:
        return board, "No move was found; write one, as in <action>up</action>."
    action = tagged.body.lower()
    if action == _VIEW:
        return board, ""
    if action not in puzzle_board.SLIDES:
        return board, f"{quoted(action)} is no move; the moves are {', '.join(puzzle_board.SLIDES)}."
    moved = puzzle_board.slide(board, action)
    return (board, f"No tile can slide {action}.") if moved is None else (moved, "")
