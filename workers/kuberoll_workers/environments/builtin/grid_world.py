"""Grid world: walk to a goal past holes and walls, one step per turn."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from kuberoll_workers.environments.builtin import grid_map
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.grid_map import MAX_SIDE, MOVES, Cell
from kuberoll_workers.environments.builtin.turn import Turn, TurnEnvironment, count_of, first_tagged, mean, quoted
from kuberoll_workers.environments.interface import Metadata, ScoringCase, UnusableRow

STOP_STRINGS = ("</action>",)


class GridWorldConfig(EnvironmentConfig):
    """The ground, the length of episodes, and the size of generated maps."""

    rows: int = Field(default=4, ge=1, le=MAX_SIDE, description="Rows of a generated map.")
    cols: int = Field(default=4, ge=1, le=MAX_SIDE, description="Columns of a generated map.")
    holes: float = Field(default=0.15, ge=0, le=1, description="Share of holes in a generated map.")
    walls: float = Field(default=0.1, ge=0, le=1, description="Share of walls in a generated map.")
    slippery: bool = Field(
        default=False, description="Whether a step may go to the left or the right of its direction, as on FrozenLake."
    )
    success_rate: float = Field(
        default=1 / 3, ge=0, le=1, description="Probability that a step on slippery ground goes where it should."
    )
    max_moves: int = Field(
        default=100, ge=1, le=100_000, description="Maximum number of turns, after which the episode ends."
    )

    @model_validator(mode="after")
    def _two_cells(self) -> Self:
        if self.rows * self.cols < 2:
            raise ValueError("rows and cols: a map has at least two cells, a start and a goal")
        return self


class GridWorldEnvironment(TurnEnvironment):
    """The policy writes `<action>up</action>`, `down`, `left` or `right`; the environment shows the map.

    The reward is 1 in the turn that reaches the goal; a hole ends the episode without one. A step into a wall or over
    the edge leaves the policy where it is. Every turn counts as a move, even a malformed one. Where a slippery step
    goes depends on the row's seed and the number of the move only.

    Episode state: `grid` (texts of S, F, H, G and #), `position` (row and column), `seed`, `moves` (turns used), at
    the end `reached`.
    """

    row_metadata: ClassVar[Mapping[str, str]] = {
        "grid": "list of texts: S the start, F free, H a hole, G the goal, # a wall",
        "position": "row and column, those of S if absent",
        "seed": "whole number that slippery steps depend on, 0 if absent",
        "moves": "turns used so far, 0 if absent",
    }

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(GridWorldConfig, config)

    def scoring_cases(self) -> list[ScoringCase]:
        """Short walks; none if the ground is slippery, or if an episode is shorter than they are."""
        if self._config.slippery or self._config.max_moves < 2:
            return []
        return [
            ScoringCase(row={"metadata": {"grid": grid}}, responses=responses, reward=reward)
            for grid, responses, reward in [
                (["SG"], ["<action>right</action>"], 1.0),
                (["SG"], ["The goal is to my right: <action> RIGHT </action>"], 1.0),
                (["SG"], ["<action>left</action>", "<action>right</action>"], 1.0),
                (["SF", "HG"], ["<action>right</action>", "<action>down</action>"], 1.0),
                (["SF", "HG"], ["<action>down</action>"], 0.0),
                (["S#", "FG"], ["<action>right</action>", "<action>right</action>"], 0.0),
                (["SG"], ["<action>left</action>"], 0.0),
                (["SG"], ["<action>right"], 0.0),
                (["SG"], ["right"], 0.0),
                (["SG"], ["<action>up</action><action>right</action>"], 0.0),
            ]
        ]

    def check_row(self, metadata: Metadata) -> None:
        """
        Raises:
            UnusableRow: The row has no valid map, or one whose goal cannot be reached.
        """
        grid, position, _, _ = _state_of(metadata or {})
        if grid_map.shortest_way(grid, position) is None:
            raise UnusableRow("metadata.grid: no way leads to the goal past the holes and walls")

    def turn(self, reply: str, state: dict[str, Any]) -> Turn:
        """See `TurnEnvironment.turn`."""
        grid, before, seed, made = _state_of(state)
        moves = made + 1
        move, note = _move(reply)
        position = before
        if move is not None:
            taken = self._taken(move, seed, moves)
            position = grid_map.moved(grid, before, taken)
            note = _note(move, taken, stayed=position == before)
        letter = grid[position[0]][position[1]]
        over = letter in "GH" or moves >= self._config.max_moves
        shown = f"{note}\n" if note else ""
        return Turn(
            observation=f"\n{shown}{grid_map.render(grid, position)}{_end(letter, moves) if over else ''}",
            metadata={
                **state,
                "position": list(position),
                "seed": seed,
                "moves": moves,
                **({"reached": letter == "G"} if over else {}),
            },
            reward=1.0 if letter == "G" else 0.0,
            terminated=over,
            stop_strings=None if over else STOP_STRINGS,
        )

    def _taken(self, move: str, seed: int, number: int) -> str:
        """The move that a move becomes."""
        if not self._config.slippery:
            return move
        return slipped(move, self._config.success_rate, random.Random(f"{seed} {number}").random())

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `success_rate`, and, if any goal was reached, `mean_moves_of_reached`."""
        states = [state or {} for state in batch["extra_env_info"]]
        moves = [state["moves"] for state in states if state.get("reached")]
        metrics = {
            "episodes": len(states),
            "success_rate": len(moves) / len(states) if states else None,
            "mean_moves_of_reached": mean(moves),
        }
        return batch, {name: value for name, value in metrics.items() if value is not None}

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with maps whose goal can be reached; a longer dataset of the same seed starts with the shorter one."""
        draw = random.Random(seed)
        return [self._row(index, draw) for index in range(count)]

    def _row(self, index: int, draw: random.Random) -> dict[str, Any]:
        config = self._config
        grid = grid_map.generated(config.rows, config.cols, holes=config.holes, walls=config.walls, draw=draw)
        slippery = "The ground is slippery: a step may go to the left or right of its direction. "
        prompt = (
            "Walk to the goal (G). You are @, . is free, a hole (O) ends the walk, and nobody passes a wall (#).\n"
            f"{slippery if config.slippery else ''}"
            "Each turn, write one step: <action>up</action>, <action>down</action>, <action>left</action> or "
            f"<action>right</action>. You have {config.max_moves} turns.\n"
            f"The map is:\n{grid_map.render(grid, grid_map.start_of(grid))}"
        )
        return {
            "messages": [{"role": "user", "content": prompt}],
            "metadata": {"grid": grid, "seed": draw.getrandbits(53), "moves": 0},
            "stop_strings": list(STOP_STRINGS),
            "idx": index,
        }


def slipped(move: str, success_rate: float, chance: float) -> str:
    """The move that a move on slippery ground becomes.

    Args:
        chance: Random number from 0 to below 1.
    """
    for share, taken in grid_map.slips(move, success_rate):
        if chance < share:
            return taken
        chance -= share
    return taken


def _move(reply: str) -> tuple[str | None, str]:
    """The move of a reply; None, and a note to the policy, if it has none."""
    tagged = first_tagged(reply, ["action"])
    if tagged is None:
        return None, "No step was found; write one, as in <action>up</action>."
    move = tagged.body.lower()
    if move not in MOVES:
        return None, f"{quoted(move)} is no step; the steps are {', '.join(MOVES)}."
    return move, ""


def _note(move: str, taken: str, *, stayed: bool) -> str:
    if taken != move:
        return f"You slip {taken}{', where you cannot go' if stayed else ''}."
    return f"You cannot go {move}." if stayed else ""


def _end(letter: str, moves: int) -> str:
    if letter == "G":
        return f"You reached the goal in {moves} {'turn' if moves == 1 else 'turns'}.\n"
    return "You fell into a hole.\n" if letter == "H" else "No turns are left.\n"


def _state_of(state: Mapping[str, Any]) -> tuple[list[str], Cell, int, int]:
    """The map, the policy's cell, the seed, and the number of moves so far."""
    grid = grid_map.parse_grid(state.get("grid"))
    seed = state.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UnusableRow(f"metadata.seed: found {seed!r}; it must be a whole number")
    return grid, _position(state.get("position"), grid), seed, count_of(state, "moves")


def _position(value: Any, grid: Sequence[str]) -> Cell:
    if value is None:
        return grid_map.start_of(grid)
    whole = isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)
    if (
        not whole
        or not (0 <= value[0] < len(grid) and 0 <= value[1] < len(grid[0]))
        or grid[value[0]][value[1]] in "#HG"
    ):
        raise UnusableRow(f"metadata.position: found {str(value)[:80]}; it must be the row and column of a free cell")
    return value[0], value[1]
