from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest

from kuberoll_workers.adapters.random_states import RandomStream
from kuberoll_workers.adapters.textarena import TextArenaEnvironment
from kuberoll_workers.environments import Episode, EpisodeEnd, UnusableEnvironment
from tests.adapters.libraries.support import ISOLATIONS, assert_needs_its_extra, run
from tests.environments.support import step_one

NUMBER = {"game": "GuessTheNumber-v0"}

# For one player, without a download or a key.
GAMES = [
    "2048-v0-ultra-easy",
    "Bandit-v0",
    "Blackjack-v0",
    "Countdown-v0",
    "Crosswords-v0",
    "Cryptarithm-v0",
    "FifteenPuzzle-v0",
    "FrozenLake-v0",
    "GuessTheNumber-v0",
    "LightsOut-v0",
    "LogicPuzzle-v0",
    "Mastermind-v0",
    "Minesweeper-v0",
    "PegJump-v0",
    "RushHour-v0",
    "Secretary-v0",
    "Set-v0",
    "Slitherlink-v0",
    "Sokoban-v0",
    "Sudoku-v0",
    "ThreeCardMonte-v0",
    "TowerOfHanoi-v0",
]


def episode(name: str = "0-0-0", seed: int = 5, metadata: Any = None) -> Episode:
    return Episode(id=name, messages=[], metadata=metadata, seed=seed, max_turns=10)


def begin(environment: TextArenaEnvironment, **changes: Any) -> Any:
    (start,) = environment.reset([episode(**changes)])
    assert start is not None
    return start


def guesses(environment: TextArenaEnvironment, state: Any) -> list[Any]:
    """Results of a search by halves."""
    low, high = 1, 20
    results: list[Any] = []
    while not results or not results[-1].terminateds[0]:
        middle = (low + high) // 2
        results.append(step_one(environment, f"I guess [{middle}]", state))
        (state,) = results[-1].metadata
        if "higher" in results[-1].observations[0]["content"]:
            low = middle + 1
        else:
            high = middle - 1
    return results


@pytest.mark.parametrize("seed", range(4))
def test_an_expert_wins(seed: int) -> None:
    environment = TextArenaEnvironment(NUMBER)
    start = begin(environment, seed=seed)
    assert "You have to guess the number between 1 and 20 within 10 turns." in start.messages[0]["content"]
    results = guesses(environment, start.metadata)
    assert [result.rewards[0] for result in results] == [0.0] * (len(results) - 1) + [1.0]
    assert results[-1].metadata[0] == {
        "episode": "0-0-0",
        "reason": "Congratulations! You guessed the correct number.",
        "invalid_move": False,
        "turn_count": len(results),
    }
    # Only what is new, and nothing of the player's own.
    assert all(result.observations[0]["content"].startswith("\nThe target number is ") for result in results[:-1])


def test_a_bad_player_gets_the_games_reward() -> None:
    environment = TextArenaEnvironment({"game": "TowerOfHanoi-v0"})
    state = begin(environment).metadata
    first = step_one(environment, "[A C]", state)
    assert (list(first.rewards), list(first.terminateds)) == ([0.0], [False])
    state = first.metadata[0]
    forgiven = step_one(environment, "[A C]", state)
    assert list(forgiven.terminateds) == [False]
    assert "You attempted an invalid move." in forgiven.observations[0]["content"]
    lost = step_one(environment, "no", forgiven.metadata[0])
    assert (list(lost.rewards), list(lost.terminateds)) == ([0.0], [True])
    assert lost.metadata[0]["invalid_move"] is True


def test_more_invalid_moves_can_be_forgiven() -> None:
    environment = TextArenaEnvironment({**NUMBER, "errorAllowance": 3})
    state = begin(environment).metadata
    ends = [step_one(environment, "no idea", state).terminateds[0] for _ in range(4)]
    assert ends == [False, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
def test_nonsense_ends_each_game_with_a_reward_below_that_of_winning(game: str) -> None:
    """Four games of TextArena 0.7.4 give the reason of an invalid move as its reward."""
    environment = TextArenaEnvironment({"game": game})
    start = begin(environment)
    assert len(start.messages[0]["content"]) > 20
    state = start.metadata
    for _ in range(3):
        result = step_one(environment, "I do not know", state)
        (state,) = result.metadata
        if result.terminateds[0]:
            break
    assert list(result.terminateds) == [True]
    assert -1.0 <= result.rewards[0] < 0.7
    assert isinstance(state, dict)
    assert not state["reason"].removeprefix("Invalid Move: ").replace(".", "").isdigit()
    environment.close([EpisodeEnd(id="0-0-0", metadata=state, reason="terminated")])


@pytest.mark.slow
@pytest.mark.parametrize("game", ["2048-v0-ultra-easy", "Blackjack-v0", "Sokoban-v0"])
def test_seed_and_moves_determine_the_game_among_others(game: str) -> None:
    """TextArena draws from Python's global random numbers during the game."""
    moves = {"2048-v0-ultra-easy": "[Up][Left]", "Blackjack-v0": "[Hit]", "Sokoban-v0": "[up]"}
    environment = TextArenaEnvironment({"game": game, "errorAllowance": 100})

    def play(name: str) -> list[str]:
        start = begin(environment, name=name, seed=4)
        state, texts = start.metadata, [start.messages[0]["content"]]
        for _ in range(8):
            result = step_one(environment, moves[game], state)
            texts.append(result.observations[0]["content"])
            (state,) = result.metadata
            if result.terminateds[0]:
                break
        return texts

    alone = play("alone")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(play, "abcdefgh")) == [alone] * 8


def test_streams_leave_the_others_numbers_alone() -> None:
    random.seed(1)
    numpy.random.seed(1)
    expected = [random.random(), random.random(), numpy.random.random()]
    random.seed(1)
    numpy.random.seed(1)
    one, other = RandomStream(7), RandomStream(7)
    drawn: list[list[float]] = [[], []]
    first = random.random()
    for _ in range(3):
        for number, stream in enumerate((one, other)):
            with stream.active():
                drawn[number] += [random.random(), float(numpy.random.random())]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 6
    assert [first, random.random(), numpy.random.random()] == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.game: "),
        ({"game": "GuessTheNumber-v9"}, "config.game: TextArena has no game 'GuessTheNumber-v9'"),
        ({"game": "TicTacToe-v0"}, "TicTacToe-v0 is not a game for one player"),
        ({"game": "KuhnPoker-v0"}, "KuhnPoker-v0 is not a game for one player"),
        ({**NUMBER, "parameters": {"most": 3}}, "cannot be played with these parameters: TypeError"),
    ],
)
def test_a_wrong_config_names_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableEnvironment) as caught:
        TextArenaEnvironment(config)
    assert message in str(caught.value)


def test_a_machine_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_needs_its_extra(monkeypatch, "textarena", "textarena", "textarena", NUMBER)


@pytest.mark.processes
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_run(tmp_path: Path, isolation: str) -> None:
    config = {**NUMBER, "parameters": {"max_number": 4}}
    records = run(
        tmp_path,
        {"name": "number", "type": "textarena", "config": config, "isolation": isolation},
        [*(f"[{number}]" for number in range(1, 5)), "hm"],
    )
    assert len(records) == 32
    won = 0
    for record in records:
        assert record.stop_reason == "terminated"
        assert record.metadata is not None
        right = record.metadata["reason"].startswith("Congratulations")
        assert right == (record.total_reward == 1.0)
        won += right
    assert won > 0
