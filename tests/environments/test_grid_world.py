"""Walks on maps: as Gymnasium's FrozenLake takes them, and as short as they can be."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.environments import UnusableEnvironment, UnusableRow
from kuberoll_workers.environments.builtin import grid_map
from kuberoll_workers.environments.builtin.grid_world import GridWorldEnvironment, slipped
from tests.environments.support import step_one
from tests.examples import examples

# FrozenLake's numbers of the moves.
NUMBERS = {"left": 0, "down": 1, "right": 2, "up": 3}


def walk(environment: GridWorldEnvironment, metadata: dict[str, Any], moves: list[str]) -> Any:
    """The last step of a walk."""
    result = None
    for move in moves:
        result = step_one(environment, f"<action>{move}</action>", metadata)
        metadata = result.metadata[0]
        assert result.next_stop_strings[0] == (None if result.terminateds[0] else ["</action>"])
        if result.terminateds[0]:
            break
    return result


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 9), st.integers(2, 9), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 2**32),
)  # fmt: skip
def test_the_shortest_way_reaches_the_goal_of_every_generated_map(
    rows: int, cols: int, holes: float, walls: float, seed: int
) -> None:
    environment = GridWorldEnvironment({"rows": rows, "cols": cols, "holes": holes, "walls": walls})
    (row,) = environment.generate_dataset(1, seed)
    environment.check_row(row["metadata"])
    grid = row["metadata"]["grid"]
    assert (len(grid), len(grid[0])) == (rows, cols)
    way = grid_map.shortest_way(grid, grid_map.start_of(grid))
    assert way
    result = walk(environment, row["metadata"], way)
    assert (result.rewards, result.terminateds) == ([1.0], [True])
    assert result.metadata[0]["moves"] == len(way)
    assert result.metadata[0]["reached"]
    for shorter in (way[:-1], way[1:]):
        if shorter and (early := walk(environment, row["metadata"], shorter)) is not None:
            assert early.rewards == [0.0]


@pytest.fixture(scope="module")
def lake() -> Any:
    pytest.importorskip("gymnasium")
    from gymnasium.envs.toy_text import frozen_lake

    return frozen_lake


@pytest.mark.parametrize("slippery", [False, True])
@pytest.mark.parametrize("name", ["4x4", "8x8"])
def test_transitions_are_those_of_frozen_lake(lake: Any, name: str, slippery: bool) -> None:
    grid = lake.MAPS[name]
    theirs = lake.FrozenLakeEnv(map_name=name, is_slippery=slippery).P
    for number in range(len(grid) * len(grid[0])):
        cell = divmod(number, len(grid[0]))
        if grid[cell[0]][cell[1]] in "GH":
            continue
        for move, action in NUMBERS.items():
            taken = grid_map.slips(move, 1 / 3) if slippery else [(1.0, move)]
            ours = []
            for share, direction in taken:
                row, col = grid_map.moved(grid, cell, direction)
                letter = grid[row][col]
                ours.append((pytest.approx(share), row * len(grid[0]) + col, float(letter == "G"), letter in "GH"))
            assert theirs[number][action] == ours


@pytest.mark.parametrize("slippery", [False, True])
@given(moves=st.lists(st.sampled_from(sorted(NUMBERS)), min_size=1, max_size=30), seed=st.integers(0, 2**32))
def test_walks_are_those_of_frozen_lake_with_the_same_chances(
    lake: Any, slippery: bool, moves: list[str], seed: int
) -> None:
    theirs = lake.FrozenLakeEnv(map_name="4x4", is_slippery=slippery)
    theirs.reset(seed=0)
    environment = GridWorldEnvironment({"slippery": slippery})
    metadata: dict[str, Any] = {"grid": lake.MAPS["4x4"], "seed": seed}
    for number, move in enumerate(moves, start=1):
        # The chance that our environment draws for this move.
        theirs.np_random = random.Random(f"{seed} {number}")
        state, reward, over, _, _ = theirs.step(NUMBERS[move])
        result = step_one(environment, f"<action>{move}</action>", metadata)
        metadata = result.metadata[0]
        assert (result.rewards[0], result.terminateds[0]) == (reward, over)
        assert divmod(int(state), 4) == tuple(metadata["position"])
        if over:
            break


def test_a_slippery_step_goes_where_its_chance_says() -> None:
    assert [slipped("up", 1 / 3, chance) for chance in (0.0, 0.3, 0.34, 0.6, 0.7, 0.999999)] == [
        "right", "right", "up", "up", "left", "left"
    ]  # fmt: skip
    assert slipped("left", 1.0, 0.999999) == "left"
    assert {slipped("left", 0.0, chance) for chance in (0.0, 0.4, 0.6)} == {"up", "down"}


def test_malformed_steps_are_answered_and_count() -> None:
    environment = GridWorldEnvironment({"maxMoves": 3})
    grid = ["S#", "FG"]
    first = step_one(environment, "<action>jump</action>", {"grid": grid})
    assert first.observations[0]["content"] == "\n'jump' is no step; the steps are left, down, right, up.\n@ #\n. G\n"
    second = step_one(environment, "<action>right</action>", first.metadata[0])
    assert second.observations[0]["content"] == "\nYou cannot go right.\n@ #\n. G\n"
    third = step_one(environment, "so", second.metadata[0])
    assert third.observations[0]["content"].endswith("@ #\n. G\nNo turns are left.\n")
    assert (third.rewards, third.terminateds, third.metadata[0]["reached"]) == ([0.0], [True], False)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "metadata.grid: found None"),
        ({"grid": ["SF", "G"]}, "metadata.grid"),
        ({"grid": ["SFx", "FGF"]}, "metadata.grid"),
        ({"grid": ["SS", "FG"]}, "metadata.grid"),
        ({"grid": ["SF"]}, "at least one G"),
        ({"grid": [""]}, "metadata.grid"),
        ({"grid": ["SG" + "F" * 49]}, "metadata.grid"),
        ({"grid": ["SHG"]}, "no way leads to the goal"),
        ({"grid": ["S#G"]}, "no way leads to the goal"),
        ({"grid": ["SFG"], "position": [0, 3]}, "metadata.position"),
        ({"grid": ["SFG"], "position": [0, 2]}, "metadata.position"),
        ({"grid": ["SFG"], "position": [0, 1.0]}, "metadata.position"),
        ({"grid": ["SFG"], "seed": "1"}, "metadata.seed"),
        ({"grid": ["SFG"], "moves": -1}, "metadata.moves"),
    ],
)
def test_unusable_rows_are_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableRow, match=message):
        GridWorldEnvironment().check_row(metadata)


def test_a_map_of_one_cell_is_refused() -> None:
    with pytest.raises(UnusableEnvironment, match="at least two cells"):
        GridWorldEnvironment({"rows": 1, "cols": 1})


def test_metrics() -> None:
    states = [{"reached": True, "moves": 4}, {"reached": False, "moves": 9}, {}, {"reached": True, "moves": 2}]
    environment = GridWorldEnvironment()
    assert environment.global_post_process_and_metrics({"extra_env_info": states})[1] == {
        "episodes": 4, "success_rate": 0.5, "mean_moves_of_reached": 3.0,
    }  # fmt: skip
    assert environment.global_post_process_and_metrics({"extra_env_info": []})[1] == {"episodes": 0}
