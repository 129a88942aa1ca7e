"""Blackjack: draw cards toward 21 against a dealer, one move per turn; the rules of Sutton and Barto."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.turn import Turn, TurnEnvironment, count_of, first_tagged, mean, quoted
from kuberoll_workers.environments.interface import Metadata, ScoringCase, UnusableRow

STOP_STRINGS = ("</action>",)
DECK = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10)
"""Values of the cards, which are drawn with replacement: an infinite deck. 1 is an ace."""
DEALER_STICKS = 17
_BEST = 21
_RESULTS = {1: "won", 0: "drawn", -1: "lost"}


class BlackjackConfig(EnvironmentConfig):
    """Rules that differ between variants of the game."""

    natural: Literal["Wins", "Pays", "Counts"] = Field(
        default="Wins",
        description="An ace and a ten in the first two cards: it wins against every other hand (Sutton and Barto); a "
        "win with it pays 1.5; or it counts as any 21.",
    )
    max_errors: int = Field(
        default=3,
        ge=0,
        le=100,
        description="Number of replies without a move that are allowed; one more loses the hand.",
    )


class BlackjackEnvironment(TurnEnvironment):
    """The policy writes `<action>hit</action>` or `<action>stick</action>`; the end of the hand gives 1, 0 or -1.

    Cards are 1 (an ace, which also counts as 11 where that is not over 21) to 10, drawn from an infinite deck; the
    dealer draws up to 17. These are the rules of Sutton and Barto, and of Gymnasium's `Blackjack-v1`. The next cards
    depend on the row's seed only, so all samples of a prompt group are dealt the same ones.

    Episode state: `player` and `dealer` (cards), `seed`, `errors` (replies without a move), at the end `result` (`won`,
    `drawn` or `lost`).
    """

    row_metadata: ClassVar[Mapping[str, str]] = {
        "player": "the policy's cards, values from 1 (an ace) to 10",
        "dealer": "the dealer's two cards, of which the policy sees the first",
        "seed": "whole number that the next cards depend on",
    }
    scoring_cases: ClassVar[Sequence[ScoringCase]] = [
        ScoringCase(
            row={"metadata": {"player": player, "dealer": dealer, "seed": 0}}, responses=responses, reward=reward
        )
        for player, dealer, responses, reward in [
            ([10, 9], [10, 8], ["<action>stick</action>"], 1.0),
            ([10, 9], [10, 8], ["I have 19: <action> Stand </action>"], 1.0),
            ([1, 7], [10, 8], ["<action>stick</action>"], 0.0),
            ([10, 7], [10, 8], ["<action>stick</action>"], -1.0),
            ([1, 10], [10, 10], ["<action>stick</action>"], 1.0),
            ([1, 10], [10, 1], ["<action>stick</action>"], 0.0),
            ([10, 9, 2], [10, 1], ["<action>stick</action>"], 0.0),
            ([10, 9], [10, 8], ["stick"], 0.0),
            ([10, 9], [10, 8], ["stick"] * 4, -1.0),
            ([10, 9], [10, 8], ["<action>double</action>"], 0.0),
            ([10, 9], [10, 8], ["<action>hit</action><action>stick</action>"], -1.0),
        ]
    ]

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(BlackjackConfig, config)

    def check_row(self, metadata: Metadata) -> None:
        """
        Raises:
            UnusableRow: The row has no valid cards or seed.
        """
        _state_of(metadata or {})

    def turn(self, reply: str, state: dict[str, Any]) -> Turn:
        """See `TurnEnvironment.turn`."""
        player, dealer, seed, errors = _state_of(state)
        action, note = _action(reply)
        if action == "hit":
            player = [*player, card(seed, len(player) + len(dealer))]
            note = f"You draw {_name(player[-1])}."
            reward = -1.0 if total(player) > _BEST else None
        elif action == "stick":
            while total(dealer) < DEALER_STICKS:
                dealer = [*dealer, card(seed, len(player) + len(dealer))]
            note = f"The dealer has {_hand(dealer)}."
            reward = payoff(player, dealer, self._config.natural)
        else:
            errors += 1
            reward = -1.0 if errors > self._config.max_errors else None
        kept = {**state, "player": player, "dealer": dealer, "errors": errors}
        if reward is None:
            return Turn(f"\n{note}\n{_shown(player, dealer)}", metadata=kept, stop_strings=STOP_STRINGS)
        result = _RESULTS[(reward > 0) - (reward < 0)]
        return Turn(
            f"\n{note}\nYou have {_hand(player)}: the hand is {result}.\n",
            metadata={**kept, "result": result},
            reward=reward,
            terminated=True,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `mean_return`, and the rates of hands that are won, drawn and lost."""
        results = [(state or {}).get("result") for state in batch["extra_env_info"]]
        metrics = {"mean_return": mean([float(reward) for reward in batch["total_reward"]])}
        for name, result in (("win_rate", "won"), ("draw_rate", "drawn"), ("loss_rate", "lost")):
            metrics[name] = mean([float(found == result) for found in results])
        return batch, {
            "episodes": len(results),
            **{name: value for name, value in metrics.items() if value is not None},
        }

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with hands that are dealt at random; a longer dataset of the same seed starts with the shorter one."""
        draw = random.Random(seed)
        return [self._row(index, draw.getrandbits(53)) for index in range(count)]

    def _row(self, index: int, seed: int) -> dict[str, Any]:
        dealer, player = [card(seed, 0), card(seed, 1)], [card(seed, 2), card(seed, 3)]
        prompt = (
            "Play a hand of blackjack. Get closer to 21 than the dealer, and not over it. An ace (A) counts 1 or 11. "
            f"The dealer draws up to {DEALER_STICKS}.\n"
            "Each turn, write one move: <action>hit</action> draws a card, <action>stick</action> ends your turn.\n"
        )
        return {
            "messages": [{"role": "user", "content": f"{prompt}{_shown(player, dealer)}"}],
            "metadata": {"player": player, "dealer": dealer, "seed": seed},
            "stop_strings": list(STOP_STRINGS),
            "idx": index,
        }


def card(seed: int, number: int) -> int:
    """The card that is drawn at a place, from 0: the dealer's two, the policy's two, those that follow."""
    return random.Random(f"{seed} {number}").choice(DECK)


def total(cards: Sequence[int]) -> int:
    """The best total of a hand: one ace counts 11 where that is not over 21."""
    hard = sum(cards)
    return hard + 10 if 1 in cards and hard + 10 <= _BEST else hard


def payoff(player: Sequence[int], dealer: Sequence[int], natural: str) -> float:
    """The reward of a policy that sticks, by the final hands; see `BlackjackConfig.natural`."""
    ours, theirs = total(player), total(dealer)
    reward = 1.0 if theirs > _BEST else float((ours > theirs) - (ours < theirs))
    if natural == "Wins" and _is_natural(player) and not _is_natural(dealer):
        return 1.0
    return 1.5 if natural == "Pays" and _is_natural(player) and reward > 0 else reward


def _is_natural(cards: Sequence[int]) -> bool:
    return sorted(cards) == [1, 10]


def _action(reply: str) -> tuple[str | None, str]:
    """The move of a reply; None, and a note to the policy, if it has none."""
    tagged = first_tagged(reply, ["action"])
    if tagged is None:
        return None, "No move was found; write one, as in <action>hit</action>."
    action = tagged.body.lower()
    if action in ("hit", "stick"):
        return action, ""
    return ("stick", "") if action == "stand" else (None, f"{quoted(action)} is no move; the moves are hit and stick.")


def _name(value: int) -> str:
    return "A" if value == 1 else str(value)


def _hand(cards: Sequence[int]) -> str:
    return f"{' '.join(map(_name, cards))} ({total(cards)})"


def _shown(player: Sequence[int], dealer: Sequence[int]) -> str:
    return f"You have {_hand(player)}. The dealer shows {_name(dealer[0])}.\n"


def _state_of(state: Mapping[str, Any]) -> tuple[list[int], list[int], int, int]:
    """The policy's cards, the dealer's cards, the seed, and the number of replies without a move."""
    player, dealer = _cards(state, "player"), _cards(state, "dealer")
    seed = state.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UnusableRow(f"metadata.seed: found {seed!r}; it must be a whole number, on which the next cards depend")
    if total(player) > _BEST:
        raise UnusableRow(f"metadata.player: found {player}; the hand is over {_BEST} already")
    return player, dealer, seed, count_of(state, "errors")


def _cards(state: Mapping[str, Any], key: str) -> list[int]:
    cards = state.get(key)
    if not isinstance(cards, list) or not 2 <= len(cards) <= _BEST or not all(card in DECK for card in cards):
        raise UnusableRow(
            f"metadata.{key}: found {str(cards)[:80]}; it must be a list of two or more cards, 1 (an ace) to 10"
        )
    return list(cards)
