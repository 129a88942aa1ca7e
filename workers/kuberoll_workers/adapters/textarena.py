"""Games of TextArena for one player."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, JsonValue

from kuberoll_workers.adapters.episodes import EpisodicEnvironment, Start, seed_of, seeded_rows
from kuberoll_workers.adapters.random_states import RandomStream
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.turn import Turn
from kuberoll_workers.environments.interface import Episode, Recovery
from kuberoll_workers.environments.libraries import Library
from kuberoll_workers.environments.registry import UnusableEnvironment

_PLAYER = 0

# Games call `int` on digits of a move, and Python reads 4300 at most; the games refuse shorter numbers themselves.
_LONG_NUMBER = re.compile(r"(\d{1000})\d+")


class TextArenaConfig(EnvironmentConfig):
    """A game of TextArena."""

    game: str = Field(min_length=1, max_length=256, description="Its id, such as GuessTheNumber-v0.")
    parameters: dict[str, JsonValue] = Field(
        default_factory=dict, description="Arguments of the game, with TextArena's names."
    )
    error_allowance: int | None = Field(
        default=None,
        ge=0,
        le=100_000,
        description="Invalid moves in succession that the game forgives; absent: as many as the game says, usually 1.",
    )
    prompt: str = Field(
        default="You play a game. Write one move each turn.\n",
        min_length=1,
        max_length=65536,
        description="System message of generated rows; the game's own rules follow it.",
    )


@dataclass(frozen=True, slots=True)
class Game:
    """A game that is played.

    Attributes:
        environment: With TextArena's wrappers, which format moves.
        core: Without them: observations are those since the last move, not the whole history again.
        stream: The game's random numbers.
    """

    environment: Any
    core: Any
    stream: RandomStream


class TextArenaEnvironment(EpisodicEnvironment[Game]):
    """The policy's response is its move, as the game's rules say, usually in square brackets.

    The reward is the game's, in the turn that ends it; the other turns have 0. The game answers an invalid move with
    the reason, and ends when there are more in succession than it forgives, with the reward that it has for this.

    Episode state: `seed` if the row names one; at the end `reason`, `invalid_move` and `turn_count` of the game.
    """

    library: ClassVar[Library] = Library("textarena", extra="textarena", distribution="textarena")
    recovery: ClassVar[Recovery] = "replay"
    row_metadata: ClassVar[Mapping[str, str]] = {"seed": "0 to 2³¹−1; absent: the episode's seed"}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid, TextArena is not installed, or the game is not for one player.
        """
        super().__init__()
        self._config = parse_config(TextArenaConfig, config)
        self._library = self.library.module()
        self._check()

    def _check(self) -> None:
        game = self._config.game
        if game not in self.library.module("envs.registration").ENV_REGISTRY:
            raise UnusableEnvironment(f"config.game: TextArena has no game {game!r}")
        try:
            made = self._game(0)
            self.end(made)
        except LookupError as error:
            raise UnusableEnvironment(
                f"config.game: {game} needs data that is not installed: {' '.join(str(error).split())[:500]}"
            ) from error
        except AssertionError as error:
            raise UnusableEnvironment(
                f"config.game: {game} is not a game for one player ({error}); games against others are not supported, "
                "because TextArena has no opponents without a model of their own"
            ) from error
        # Games raise whatever their constructor does; some are no valid Python in this version.
        except Exception as error:
            raise UnusableEnvironment(
                f"config.game: {game} cannot be played with these parameters: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(made.core.state, self._library.SinglePlayerState):
            raise UnusableEnvironment(f"config.game: {game} is a game for several players, which are not supported")

    def _game(self, seed: int) -> Game:
        stream = RandomStream(seed)
        with stream.active():
            environment = self._library.make(self._config.game, **self._config.parameters)
            environment.reset(num_players=1, seed=seed)
        core = environment
        while isinstance(core, self._library.Wrapper):
            core = core.env
        if self._config.error_allowance is not None:
            core.state.error_allowance = self._config.error_allowance
        _repair(core.state)
        return Game(environment, core, stream)

    def begin(self, episode: Episode) -> Start[Game]:
        """Make a game with the episode's seed; its rules are the observation."""
        game = self._game(seed_of(episode))
        return Start(game, messages=[{"role": "user", "content": f"{_observed(game)}\n"}])

    def play(self, game: Game, reply: str, state: dict[str, Any]) -> Turn:
        """Make a move."""
        with game.stream.active():
            over, _ = game.environment.step(_LONG_NUMBER.sub(r"\1", reply.strip()))
        shown = _observed(game)
        if not over:
            return Turn(f"\n{shown}\n", state)
        rewards, infos = game.core.close()
        info = infos[_PLAYER]
        reason = str(info.get("reason") or "The game is over.")
        end = {"reason": reason, "invalid_move": bool(info.get("invalid_move")), "turn_count": info.get("turn_count")}
        return Turn(
            "\n" + "".join(f"{text}\n" for text in (shown, reason) if text),
            {**state, **end},
            reward=rewards[_PLAYER],
            terminated=True,
        )

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with seeds; see `seeded_rows`."""
        return seeded_rows(self._config.prompt, count, seed)


def _observed(game: Game) -> str:
    """Texts since the last move, without the player's own."""
    _, messages = game.core.get_observation()
    # Three games pass their arguments in the wrong order when they repeat a move: its text is then the player's number.
    return "\n".join(text.strip("\n") for sender, text, *_ in messages if sender != _PLAYER and isinstance(text, str))


def _repair(state: Any) -> None:
    """Exchange reason and reward of an invalid move where a game has confused them, as four of TextArena 0.7.4 do."""
    original = getattr(state, "set_invalid_move", None)
    if original is None:
        return

    def set_invalid_move(reason: Any = None, reward: Any = -1.0) -> Any:
        if isinstance(reward, str):
            reason, reward = reward, reason
        return original(reason=reason, reward=reward)

    state.set_invalid_move = set_invalid_move
