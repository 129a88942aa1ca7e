"""Environments of SkyRL Gym."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, JsonValue

from kuberoll_workers.adapters.episodes import EpisodicEnvironment, Start
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.turn import Reply, Turn
from kuberoll_workers.environments.interface import Episode, Recovery, UnusableRow
from kuberoll_workers.environments.libraries import Library
from kuberoll_workers.environments.registry import UnusableEnvironment

# A dependency of SkyRL Gym.
_OMEGACONF = Library("omegaconf", extra="skyrl-gym", distribution="omegaconf")


class SkyRLGymConfig(EnvironmentConfig):
    """An environment of SkyRL Gym."""

    id: str = Field(min_length=1, max_length=256, description="Its id, SkyRL's `env_class`, such as gsm8k.")
    entrypoint: str | None = Field(
        default=None,
        pattern=r"^[\w.]+:[\w.]+$",
        max_length=512,
        description="Class of an environment of your own, package.module:Class, which is registered as `id`.",
    )
    parameters: dict[str, JsonValue] = Field(default_factory=dict, description="The environment's `env_config`.")
    stop_strings: list[str] = Field(default_factory=list, max_length=256, description="Stop strings of every turn.")


class SkyRLGymEnvironment(EpisodicEnvironment[Any]):
    """Each response is one `step`; its observations are joined to one message.

    The row's metadata is the environment's `extras`, with `max_turns` of the job unless the row has its own. Rewards
    and ends are the environment's.

    Episode state: the row's metadata, and at the end `metrics`, the numbers of `get_metrics`.
    """

    library: ClassVar[Library] = Library("skyrl_gym", extra="skyrl-gym", distribution="skyrl-gym")
    # Tools and searches of an environment need not answer twice alike.
    recovery: ClassVar[Recovery] = "restart"
    row_metadata: ClassVar[Mapping[str, str]] = {
        "reward_spec": "and further fields: the environment's extras, such as {ground_truth: 7}"
    }

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid, or SkyRL Gym is not installed.
        """
        super().__init__()
        self._config = parse_config(SkyRLGymConfig, config)
        self._library = self.library.module()
        self._parameters = _OMEGACONF.module().OmegaConf.create(dict(self._config.parameters))
        registration = self.library.module("envs.registration")
        name, entrypoint = self._config.id, self._config.entrypoint
        if entrypoint is not None and name not in registration.registry:
            registration.register(id=name, entry_point=entrypoint)
        if name not in registration.registry:
            raise UnusableEnvironment(
                f"config.id: SkyRL Gym has no environment {name!r}; it has {', '.join(sorted(registration.registry))}"
            )
        found = registration.registry[name].entry_point
        if entrypoint is not None and found != entrypoint:
            raise UnusableEnvironment(f"config.id: {name} is {found} already: choose another id")
        try:
            registration.load_env_creator(found)
        except (ImportError, AttributeError) as error:
            raise UnusableEnvironment(f"config.id: {name}, {found}, cannot be imported: {error}") from error

    def begin(self, episode: Episode) -> Start[Any]:
        """Make an environment from the row, and give it the prompt.

        Raises:
            UnusableRow: It lacks a field.
            ValueError: The environment changes the prompt.
        """
        extras = {"max_turns": episode.max_turns, **copy.deepcopy(episode.metadata or {})}
        try:
            environment = self._library.make(self._config.id, env_config=self._parameters, extras=extras)
        except (AssertionError, KeyError) as error:
            raise UnusableRow(
                f"metadata: {self._config.id} does not accept it: {type(error).__name__}: {error}"
            ) from error
        given = [dict(message) for message in episode.messages]
        try:
            prompt, _ = environment.init([dict(message) for message in given])
            if prompt[: len(given)] != given:
                raise ValueError(f"init of {self._config.id} changed the row's prompt; it can only add messages")
        except BaseException:
            environment.close()
            raise
        return Start(environment, messages=prompt[len(given) :], stop_strings=self._stop_strings())

    def _stop_strings(self) -> list[str] | None:
        return list(self._config.stop_strings) or None

    def play(self, game: Any, reply: Reply, state: dict[str, Any]) -> Turn:
        """Take a step."""
        # Its environments look at thoughts that have ended, too.
        output = game.step(reply.response)
        over = bool(output["done"])
        contents = [str(message["content"]) for message in output["observations"]]
        stops = None if over else self._stop_strings()
        return Turn(
            "\n".join(contents),
            {**state, "metrics": _numbers(game.get_metrics())} if over else state,
            reward=output["reward"],
            terminated=over,
            stop_strings=None if stops is None else tuple(stops),
        )

    def end(self, game: Any) -> None:
        """Close the environment."""
        game.close()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    values = {str(name): value for name, value in metrics.items() if isinstance(value, (int, float))}
    return {name: value for name, value in values.items() if math.isfinite(value)}
