"""Base of the adapters whose libraries keep an object for each episode."""

from __future__ import annotations

import abc
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from typing_extensions import TypeVar

from kuberoll_workers.environments.builtin.turn import Reply, Turn, TurnEnvironment, mean
from kuberoll_workers.environments.interface import Episode, EpisodeEnd, EpisodeStart, UnusableRow

_EPISODE = "episode"
# The libraries take no larger one.
_MAX_SEED = (1 << 31) - 1

_Game = TypeVar("_Game")


@dataclass(frozen=True, slots=True)
class Start(Generic[_Game]):
    """An episode's object and its beginning.

    Attributes:
        messages: First observation, added to the row's prompt.
        metadata: Entries that the episode's state has beside those of the row.
        stop_strings: Of the first turn; None: those of the row.
    """

    game: _Game
    messages: Sequence[Mapping[str, str]] = ()
    metadata: Mapping[str, Any] | None = None
    stop_strings: Sequence[str] | None = None


class EpisodicEnvironment(TurnEnvironment, Generic[_Game]):
    """An environment with an object for each episode, made by `begin` and freed by `end`.

    Episode state: the row's metadata, and `episode`, the name of the object.
    """

    def __init__(self) -> None:
        self._games: dict[str, _Game] = {}

    @abc.abstractmethod
    def begin(self, episode: Episode) -> Start[_Game]:
        """Begin an episode.

        Raises:
            UnusableRow: A row's metadata is wrong.
        """

    @abc.abstractmethod
    def play(self, game: _Game, reply: Reply, state: dict[str, Any]) -> Turn:
        """Take a turn; the turn's metadata is the state with what has changed."""

    def end(self, game: _Game) -> None:
        """Free an episode's object."""

    def reset(self, episodes: list[Episode]) -> list[EpisodeStart | None]:
        """Begin each episode."""
        starts: list[EpisodeStart | None] = []
        for episode in episodes:
            self._free(episode.id)
            start = self.begin(episode)
            self._games[episode.id] = start.game
            starts.append(
                EpisodeStart(
                    messages=start.messages,
                    metadata={**(episode.metadata or {}), **(start.metadata or {}), _EPISODE: episode.id},
                    stop_strings=start.stop_strings,
                )
            )
        return starts

    def turn(self, reply: Reply, state: dict[str, Any]) -> Turn:
        """See `TurnEnvironment.turn`."""
        return self.play(self._games[state[_EPISODE]], reply, state)

    def close(self, episodes: list[EpisodeEnd]) -> None:
        """Free the objects of the episodes."""
        for episode in episodes:
            self._free(episode.id)

    def shutdown(self) -> None:
        """Free the objects of all episodes."""
        for name in list(self._games):
            self._free(name)

    def _free(self, name: str) -> None:
        game = self._games.pop(name, None)
        if game is not None:
            self.end(game)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `mean_reward` and `mean_turns`."""
        return batch, reward_metrics(batch)


def reward_metrics(batch: Any) -> dict[str, float]:
    """`mean_reward` and `mean_turns` of finished trajectories; empty if there are none."""
    metrics = {
        "mean_reward": mean([float(reward) for reward in batch["total_reward"]]),
        "mean_turns": mean([float(turns) for turns in batch["turn_count"]]),
    }
    return {name: value for name, value in metrics.items() if value is not None}


def seed_of(episode: Episode) -> int:
    """Seed of an episode, from 0 to 2³¹−1: `seed` of the row's metadata, else from that of the episode.

    Raises:
        UnusableRow: The row's is none.
    """
    given = (episode.metadata or {}).get("seed")
    if given is None:
        return episode.seed % (_MAX_SEED + 1)
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= _MAX_SEED:
        raise UnusableRow(f"metadata.seed: found {given!r}; it must be a whole number from 0 to {_MAX_SEED}")
    return given


def seeded_rows(prompt: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with a system message, and seeds for `seed_of`; a longer dataset of the same seed starts with the shorter.

    Args:
        count: Number of rows.
        seed: Of the dataset.
    """
    draw = random.Random(seed)
    return [
        {
            "messages": [{"role": "system", "content": prompt}],
            "metadata": {"seed": draw.randint(0, _MAX_SEED)},
            "idx": index,
        }
        for index in range(count)
    ]
