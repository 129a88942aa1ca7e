"""Environments of Gymnasium, played in text."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import Field, JsonValue

from kuberoll_workers.adapters.episodes import EpisodicEnvironment, Start, seed_of, seeded_rows
from kuberoll_workers.adapters.functions import function_of
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.turn import Turn, first_tagged, quoted
from kuberoll_workers.environments.interface import Episode, Recovery, UnusableRow
from kuberoll_workers.environments.libraries import Library
from kuberoll_workers.environments.registry import UnusableEnvironment

VALUE, RENDER = "value", "render"

_TAG = "action"
_STOP_STRINGS = (f"</{_TAG}>",)
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumConfig(EnvironmentConfig):
    """An environment of Gymnasium, and the text of its observations and actions."""

    id: str = Field(min_length=1, max_length=256, description="Its id, also `module:Id-v0`.")
    parameters: dict[str, JsonValue] = Field(
        default_factory=dict, description="Further arguments of gymnasium.make, with Gymnasium's names."
    )
    observation: str = Field(
        default=VALUE,
        description="value: the observation as text; render: the text of render mode ansi, without colors; or a "
        "function of observation and environment, package.module:function.",
    )
    actions: dict[str, JsonValue] | str | None = Field(
        default=None,
        description="Values of the actions by name; or a function of text and environment, package.module:function, "
        "which raises ValueError for what is no action; absent: the action's value as JSON.",
    )
    prompt: str | None = Field(
        default=None, max_length=65536, description="System message of generated rows; absent: how to write actions."
    )
    unreadable_reward: float = Field(
        default=0.0,
        ge=-1e6,
        le=1e6,
        description="Reward of a turn without a readable action; the environment takes no step.",
    )


class GymnasiumEnvironment(EpisodicEnvironment[Any]):
    """The policy writes `<action>right</action>`; the environment takes a step and shows its observation.

    Rewards and ends are Gymnasium's. A truncated episode of Gymnasium, by its own limit of steps, has ended, and its
    metadata says `outcome: truncated`. A response without a readable action is answered with the reason.

    Episode state: `seed` if the row names one, `options` of Gymnasium's `reset`, `steps`, `outcome` at the end.
    """

    library: ClassVar[Library] = Library("gymnasium", extra="gymnasium", distribution="gymnasium")
    recovery: ClassVar[Recovery] = "replay"
    row_metadata: ClassVar[Mapping[str, str]] = {
        "seed": "0 to 2³¹−1; absent: the episode's seed",
        "options": "options of Gymnasium's reset, if it has any",
    }

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid, or Gymnasium is not installed.
        """
        super().__init__()
        self._config = parse_config(GymnasiumConfig, config)
        self._library = self.library.module()
        self._observe = self._observation_function()
        self._read = self._action_function()
        with contextlib.closing(self._make()) as environment:
            self._space = environment.action_space
            for name, value in self._named().items():
                if not self._contains(self._space, self._value(self._space, value)):
                    raise UnusableEnvironment(f"config.actions.{name}: {value!r} is no action of {self._space}")

    def _named(self) -> dict[str, JsonValue]:
        return self._config.actions if isinstance(self._config.actions, dict) else {}

    def _make(self) -> Any:
        parameters = dict(self._config.parameters)
        if self._config.observation == RENDER:
            parameters.setdefault("render_mode", "ansi")
        try:
            return self._library.make(self._config.id, **parameters)
        except self._library.error.DependencyNotInstalled as error:
            raise UnusableEnvironment(f"config.id: {self._config.id} needs a further package: {error}") from error
        except (self._library.error.Error, ImportError, TypeError, ValueError) as error:
            raise UnusableEnvironment(f"config.id: {self._config.id} cannot be made: {error}") from error

    def _observation_function(self) -> Callable[[Any, Any], Any]:
        if self._config.observation == VALUE:
            return lambda observation, _: text_of(observation)
        if self._config.observation == RENDER:
            return lambda _, environment: _COLORS.sub("", _rendered(environment)).strip("\n")
        return function_of(self._config.observation, "config.observation")

    def _action_function(self) -> Callable[[str, Any], Any]:
        if isinstance(self._config.actions, str):
            return function_of(self._config.actions, "config.actions")
        return self._action

    def _action(self, text: str, environment: Any) -> Any:
        names = {name.casefold(): value for name, value in self._named().items()}
        if names:
            if text.casefold() not in names:
                raise ValueError(f"the actions are {', '.join(self._named())}")
            return self._value(environment.action_space, names[text.casefold()])
        try:
            given = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"an action is a value of {environment.action_space}") from error
        return self._value(environment.action_space, given)

    def _value(self, space: Any, given: Any) -> Any:
        """An action from its JSON value; arrays and tuples are lists there."""
        spaces = self._library.spaces
        if isinstance(space, spaces.Tuple) and isinstance(given, list) and len(given) == len(space.spaces):
            return tuple(self._value(part, value) for part, value in zip(space.spaces, given, strict=True))
        if isinstance(space, spaces.Dict) and isinstance(given, Mapping):
            return {name: self._value(space.spaces.get(name), value) for name, value in given.items()}
        if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary) and isinstance(given, list):
            import numpy

            with contextlib.suppress(TypeError, ValueError, OverflowError):
                return numpy.asarray(given, dtype=space.dtype)
        return given

    @staticmethod
    def _contains(space: Any, action: Any) -> bool:
        # JSON's true is an int in Python, but no number of an action.
        if isinstance(action, bool):
            return False
        try:
            return bool(space.contains(action))
        # Spaces make arrays of what they are given, and raise where they cannot.
        except (TypeError, ValueError, OverflowError):
            return False

    def begin(self, episode: Episode) -> Start[Any]:
        """Make an environment and reset it with the episode's seed."""
        options = (episode.metadata or {}).get("options")
        if options is not None and not isinstance(options, dict):
            raise UnusableRow(f"metadata.options: found {options!r}; they must be an object, or absent")
        seed = seed_of(episode)
        environment = self._make()
        try:
            observation, _ = environment.reset(seed=seed, options=options)
            text = str(self._observe(observation, environment))
        except BaseException:
            environment.close()
            raise
        return Start(
            environment,
            messages=[{"role": "user", "content": f"{text}\n"}],
            metadata={"steps": 0},
            stop_strings=_STOP_STRINGS,
        )

    def play(self, game: Any, reply: str, state: dict[str, Any]) -> Turn:
        """Take a step, or say why the reply is no action."""
        tagged = first_tagged(reply, [_TAG])
        if tagged is None:
            return self._unreadable(f"No action was found; write one, as in <{_TAG}>…</{_TAG}>.", state)
        try:
            action = self._read(tagged.body, game)
        except ValueError as error:
            return self._unreadable(f"{quoted(tagged.body)} is no action: {error}.", state)
        if not self._contains(game.action_space, action):
            return self._unreadable(f"{quoted(tagged.body)} is no action of {game.action_space}.", state)
        observation, reward, terminated, truncated, _ = game.step(action)
        over = bool(terminated or truncated)
        outcome = {"outcome": "terminated" if terminated else "truncated"} if over else {}
        return Turn(
            observation=f"\n{self._observe(observation, game)}\n",
            metadata={**state, "steps": state["steps"] + 1, **outcome},
            reward=reward,
            terminated=over,
            stop_strings=None if over else _STOP_STRINGS,
        )

    def _unreadable(self, note: str, state: dict[str, Any]) -> Turn:
        return Turn(f"\n{note}\n", state, reward=self._config.unreadable_reward, stop_strings=_STOP_STRINGS)

    def end(self, game: Any) -> None:
        """Close the environment."""
        game.close()

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with seeds; see `seeded_rows`."""
        return seeded_rows(self._prompt(), count, seed)

    def _prompt(self) -> str:
        if self._config.prompt is not None:
            return self._config.prompt
        if self._named():
            known = f"one of {', '.join(self._named())}"
        elif isinstance(self._config.actions, str):
            known = "an action"
        else:
            known = f"a value of {self._space}, as JSON"
        return (
            f"You play {self._config.id}. Each turn you see an observation; write your action, {known}, as in "
            f"<{_TAG}>…</{_TAG}>.\n"
        )


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def text_of(observation: Any) -> str:
    """An observation as text: texts as they are, everything else as Python's literals, arrays as lists."""
    return observation if isinstance(observation, str) else str(_plain(observation))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    # Shortest decimals of 32-bit floats; their 64-bit values have noise of ten digits.
    if getattr(getattr(value, "dtype", None), "kind", "") == "f":
        return [_plain(item) for item in value] if value.ndim else float(str(value))
    return value.tolist() if hasattr(value, "tolist") else value


def _rendered(environment: Any) -> str:
    rendered = environment.render()
    if not isinstance(rendered, str):
        raise TypeError(
            f"render returned {type(rendered).__name__}, not a text: config.observation must be value or a function"
        )
    return rendered
