"""Hands of blackjack: as Gymnasium plays them with the same cards, and as well as an expert can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.environments import UnusableRow
from kuberoll_workers.environments.builtin.blackjack import BlackjackEnvironment, card, total
from tests.environments.support import step_all, step_one

HAND = {"player": [10, 6], "dealer": [10, 7], "seed": 1}


def play(
    environment: BlackjackEnvironment, row: dict[str, Any], actions: Iterator[str]
) -> tuple[float, dict[str, Any]]:
    """The return of a hand, and its last state."""
    metadata: dict[str, Any] = row["metadata"]
    reward = 0.0
    for action in actions:
        result = step_one(environment, f"<action>{action}</action>", metadata)
        metadata = result.metadata[0]
        reward += result.rewards[0]
        assert result.next_stop_strings[0] == (None if result.terminateds[0] else ["</action>"])
        if result.terminateds[0]:
            break
    return reward, metadata


RULES: list[tuple[str, dict[str, bool]]] = [
    ("Wins", {"sab": True, "natural": False}),
    ("Pays", {"sab": False, "natural": True}),
    ("Counts", {"sab": False, "natural": False}),
]


@pytest.mark.parametrize(("natural", "options"), RULES)
@given(seed=st.integers(0, 2**53 - 1), hits=st.integers(0, 6))
def test_returns_are_those_of_gymnasium_with_the_same_cards(
    natural: str, options: dict[str, bool], seed: int, hits: int
) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    from gymnasium.envs.toy_text import blackjack

    cards = (card(seed, number) for number in range(100))
    actions = ["hit"] * hits + ["stick"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blackjack, "draw_card", lambda _: next(cards))
        theirs = gymnasium.make("Blackjack-v1", **options)
        seen, _ = theirs.reset(seed=0)
        row = BlackjackEnvironment()._row(0, seed)
        assert (total(row["metadata"]["player"]), row["metadata"]["dealer"][0]) == seen[:2]
        expected, over = 0.0, False
        while not over:
            seen, reward, over, _, _ = theirs.step(int(actions.pop(0) == "hit"))
            expected += float(reward)
    environment = BlackjackEnvironment({"natural": natural})
    reward, state = play(environment, row, iter(["hit"] * hits + ["stick"]))
    assert reward == expected
    assert state["player"] == theirs.unwrapped.player
    assert state["dealer"] == theirs.unwrapped.dealer


def expert(state: dict[str, Any]) -> str:
    """The optimal policy of Sutton and Barto's figure 5.2."""
    mine, shown = total(state["player"]), state["dealer"][0]
    if mine != sum(state["player"]):
        return "stick" if mine >= 19 or (mine == 18 and 2 <= shown <= 8) else "hit"
    return "stick" if mine >= 17 or (mine >= 13 and 2 <= shown <= 6) or (mine == 12 and 4 <= shown <= 6) else "hit"


def test_an_expert_loses_a_little_and_others_lose_more() -> None:
    environment = BlackjackEnvironment()
    rows = environment.generate_dataset(2000, seed=3)

    def mean_return(policy: Any) -> float:
        states: list[Any] = [row["metadata"] for row in rows]
        rewards = [0.0] * len(rows)
        going = list(range(len(rows)))
        while going:
            replies = [f"<action>{policy(states[index])}</action>" for index in going]
            result = step_all(environment, replies, [states[index] for index in going])
            for index, state, reward in zip(going, result.metadata, result.rewards, strict=True):
                states[index] = state
                rewards[index] += reward
            going = [index for index, over in zip(going, result.terminateds, strict=True) if not over]
        return sum(rewards) / len(rewards)

    # The expert's expectation is about -0.045.
    assert -0.1 < mean_return(expert) < 0.02
    assert mean_return(lambda _: "stick") < -0.1
    assert mean_return(lambda state: "hit" if total(state["player"]) < 19 else "stick") < -0.15


def test_a_reply_without_a_move_is_answered_and_too_many_lose_the_hand() -> None:
    environment = BlackjackEnvironment({"maxErrors": 1})
    first = step_one(environment, "I would <action>fold</action>", HAND)
    assert first.observations[0]["content"] == (
        "\n'fold' is no move; the moves are hit and stick.\nYou have 10 6 (16). The dealer shows 10.\n"
    )
    assert (first.rewards, first.terminateds) == ([0.0], [False])
    second = step_one(environment, "hm", first.metadata[0])
    assert (second.rewards, second.terminateds, second.metadata[0]["result"]) == ([-1.0], [True], "lost")


def test_the_dealer_s_second_card_is_hidden() -> None:
    environment = BlackjackEnvironment()
    for row in environment.generate_dataset(20, 0):
        prompt = row["messages"][0]["content"]
        shown = row["metadata"]["dealer"][0]
        assert prompt.endswith(f"The dealer shows {'A' if shown == 1 else shown}.\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"player": None}, "metadata.player: found None"),
        ({"player": [10]}, r"metadata.player: found \[10\]"),
        ({"dealer": [0, 5]}, r"metadata.dealer: found \[0, 5\]"),
        ({"dealer": ["A", 5]}, "metadata.dealer"),
        ({"player": [10, 9, 8]}, "is over 21 already"),
        ({"seed": None}, "metadata.seed: found None"),
        ({"errors": -1}, "metadata.errors"),
    ],
)
def test_unusable_rows_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableRow, match=message):
        BlackjackEnvironment().check_row({**HAND, **change})


def test_metrics() -> None:
    environment = BlackjackEnvironment()
    states = [{"result": "won"}, {"result": "lost"}, {"result": "drawn"}, {}]
    batch = {"extra_env_info": states, "total_reward": [1.0, -1.0, 0.0, 0.0]}
    assert environment.global_post_process_and_metrics(batch)[1] == {
        "episodes": 4, "mean_return": 0.0, "win_rate": 0.25, "draw_rate": 0.25, "loss_rate": 0.25,
    }  # fmt: skip
    assert environment.global_post_process_and_metrics({"extra_env_info": [], "total_reward": []})[1] == {"episodes": 0}
