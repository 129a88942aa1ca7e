from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.environments.builtin.puzzle_board import (
    OPPOSITE,
    SLIDES,
    Board,
    is_solved,
    parse_board,
    render,
    shuffled,
    slide,
    solved_board,
)
from kuberoll_workers.environments.builtin.sliding_puzzle import SlidingPuzzleEnvironment
from tests.environments.support import step_all, step_one
from tests.examples import examples

SHAPES = st.sampled_from([(2, 2), (2, 3), (3, 2)])
BOARD = [[1, 2], [0, 3]]  # one "left" from the goal


def shortest_moves(start: Board) -> list[str]:
    """Breadth-first search."""
    ways: dict[Board, list[str]] = {start: []}
    frontier = deque([start])
    while not is_solved(frontier[0]):
        board = frontier.popleft()
        for move in SLIDES:
            after = slide(board, move)
            if after is not None and after not in ways:
                ways[after] = [*ways[board], move]
                frontier.append(after)
    return ways[frontier[0]]


def environment(**config: Any) -> SlidingPuzzleEnvironment:
    return SlidingPuzzleEnvironment({"size": 2, "shuffleMoves": 10, "maxMoves": 6, **config})


@settings(max_examples=examples(40), deadline=None)
@given(SHAPES, st.integers(1, 30), st.integers(0, 2**32))
def test_an_expert_solves_every_generated_board(shape: tuple[int, int], shuffle: int, seed: int) -> None:
    rows, cols = shape
    puzzle = SlidingPuzzleEnvironment({"rows": rows, "cols": cols, "shuffleMoves": shuffle, "maxMoves": 60})
    (row,) = puzzle.generate_dataset(1, seed)
    board = parse_board(row["metadata"]["board"])
    assert not is_solved(board)
    moves = shortest_moves(board)
    assert 1 <= len(moves) <= shuffle
    metadata, rewards, stops = row["metadata"], [], row["stop_strings"]
    for number, move in enumerate(moves, start=1):
        assert stops == ["</action>"]
        result = step_one(puzzle, f"<action>{move}</action>", metadata)
        metadata, (stops,) = result.metadata[0], result.next_stop_strings
        rewards += result.rewards
        assert list(result.terminateds) == [number == len(moves)]
    assert rewards == [0.0] * (len(moves) - 1) + [1.0]
    assert metadata["solved"]
    assert metadata["moves"] == len(moves)
    assert stops is None


@given(SHAPES, st.integers(1, 50), st.integers(0, 2**32), st.sampled_from(list(SLIDES)))
def test_a_slide_is_undone_by_its_opposite(shape: tuple[int, int], shuffle: int, seed: int, move: str) -> None:
    board = shuffled(*shape, shuffle, random.Random(seed))
    moved = slide(board, move)
    if moved is not None:
        assert moved != board
        assert slide(moved, OPPOSITE[move]) == board


@pytest.mark.parametrize(
    ("move", "after"),
    [("up", None), ("down", [[0, 2], [1, 3]]), ("left", [[1, 2], [3, 0]]), ("right", None)],
)
def test_directions_name_the_way_the_tile_slides(move: str, after: list[list[int]] | None) -> None:
    moved = slide(parse_board(BOARD), move)
    assert moved == (None if after is None else parse_board(after))


def test_what_the_policy_sees() -> None:
    puzzle = environment()
    seen = step_one(puzzle, "I think <action> DOWN </action>>", {"board": BOARD})
    assert seen.observations[0] == {"role": "environment", "content": "\n_ 2\n1 3\n"}
    assert seen.metadata[0] == {"board": [[0, 2], [1, 3]], "moves": 1, "solved": False}
    solved = step_one(puzzle, "<action>left</action>", {"board": BOARD, "moves": 1, "note": "kept"})
    assert solved.observations[0]["content"] == "\n1 2\n3 _\nSolved in 2 turns.\n"
    assert solved.metadata[0]["note"] == "kept"
    assert render(solved_board(3, 4)) == " 1  2  3  4\n 5  6  7  8\n 9 10 11  _\n"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("", "No move was found"),
        ("<action>left", "No move was found"),
        ("left</action>", "No move was found"),
        ("<action></action>", "'' is no move; the moves are up, down, left, right."),
        ("<action>left, then up</action>", "'left, then up' is no move"),
        ("<action>up</action>", "No tile can slide up."),
    ],
)
def test_a_bad_move_is_told_and_counts(reply: str, said: str) -> None:
    result = step_one(environment(), reply, {"board": BOARD, "moves": 2})
    assert said in result.observations[0]["content"]
    assert result.observations[0]["content"].endswith("\n1 2\n_ 3\n")
    assert result.metadata[0] == {"board": BOARD, "moves": 3, "solved": False}
    assert list(result.rewards) == [0.0]
    assert list(result.terminateds) == [False]


def test_view_shows_the_board_and_counts() -> None:
    result = step_one(environment(), "<action>view</action>", {"board": BOARD})
    assert result.observations[0]["content"] == "\n1 2\n_ 3\n"
    assert result.metadata[0]["moves"] == 1


@pytest.mark.parametrize("reply", ["<action>down</action>", "nonsense", "<action>view</action>"])
def test_the_limit_ends_the_episode_in_its_own_turn(reply: str) -> None:
    result = step_one(environment(maxMoves=3), reply, {"board": BOARD, "moves": 2})
    assert list(result.terminateds) == [True]
    assert list(result.rewards) == [0.0]
    assert result.next_stop_strings == [None]
    assert result.observations[0]["content"].endswith("No turns are left.\n")
    solved = step_one(environment(maxMoves=3), "<action>left</action>", {"board": BOARD, "moves": 2})
    assert list(solved.rewards) == [1.0]


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.text(), st.sampled_from([f"<action>{m}</action>" for m in [*SLIDES, "view"]])),
            st.integers(0, 5),
        ),
        max_size=5,
    )
)
def test_a_batch_equals_its_singles_and_nothing_raises(episodes: list[tuple[str, int]]) -> None:
    puzzle = environment()
    metadata: list[dict[str, Any] | None] = [{"board": BOARD, "moves": moves} for _, moves in episodes]
    batch = step_all(puzzle, [reply for reply, _ in episodes], metadata)
    for index, (reply, _) in enumerate(episodes):
        single = step_one(puzzle, reply, metadata[index])
        assert [column[index] for column in batch] == [column[0] for column in single]
        assert isinstance(single.observations[0]["content"], str)


@pytest.mark.parametrize(
    "board",
    [None, 3, [], [[]], [[0]], [[1, 2], [3]], [[1, 2], [3, 3]], [[1, 2], [3, "0"]], [[1, 2, 3, 0], 4], [[1, True]]],
)
def test_a_row_without_a_proper_board_is_an_error(board: Any) -> None:
    with pytest.raises(ValueError, match=r"metadata\.board"):
        environment().step([[{"role": "assistant", "content": ""}]], [{"board": board}])


def test_a_row_without_metadata_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"metadata\.board"):
        environment().step([[{"role": "assistant", "content": ""}]], [None])


def test_the_dataset_depends_on_the_seed_alone() -> None:
    rows = environment().generate_dataset(40, 7)
    assert rows == environment().generate_dataset(50, 7)[:40]
    assert rows != environment().generate_dataset(40, 8)
    assert [row["idx"] for row in rows] == list(range(40))
    # All boards that 10 slides lead to, not only those at one distance.
    assert len({str(row["metadata"]["board"]) for row in environment().generate_dataset(400, 0)}) == 11
    assert "You have 6 turns." in rows[0]["messages"][0]["content"]


def test_metrics() -> None:
    batch = {"extra_env_info": [{"solved": True, "moves": 2}, {"solved": True, "moves": 4}, {"moves": 6}, None]}
    same, metrics = environment().global_post_process_and_metrics(batch)
    assert same is batch
    assert metrics == {"episodes": 4, "solve_rate": 0.5, "mean_moves_of_solved": 3.0}
    assert environment().global_post_process_and_metrics({"extra_env_info": []})[1] == {"episodes": 0}
