"""Servers of OpenEnv's package: the environment that `openenv init` writes, and a game with an end.

python serve_openenv.py echo DIRECTORY [SESSIONS]
"""

from __future__ import annotations

import random
import sys
from typing import Any

from tests.adapters.libraries.serve_nemo_gym import serve


def echo(directory: str, sessions: int) -> Any:
    """The app of `openenv init my_echo`, for more than one session at a time."""
    from openenv.cli.commands.init import init
    from openenv.core.env_server.http_server import create_app

    init("my_echo", output_dir=directory)
    sys.path.insert(0, directory)
    from my_echo.models import MyEchoAction, MyEchoObservation
    from my_echo.server.my_echo_environment import MyEchoEnvironment

    return create_app(MyEchoEnvironment, MyEchoAction, MyEchoObservation, env_name="echo", max_concurrent_envs=sessions)


def number(_: str, sessions: int) -> Any:
    """A number from 1 to `highest` to guess, by OpenEnv's classes; `0` makes the environment raise an exception."""
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):  # type: ignore[misc]
        value: int

    class Hint(Observation):  # type: ignore[misc]
        text: str

    class Number(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, highest: int = 8) -> Hint:
            self._number = random.Random(seed).randint(1, highest)
            self._state = State(episode_id=episode_id, step_count=0)
            return Hint(text=f"Guess a number from 1 to {highest}.")

        def step(self, action: Guess) -> Hint:
            if action.value == 0:
                raise RuntimeError("zero")
            self._state.step_count += 1
            if action.value == self._number:
                return Hint(text="Right.", done=True, reward=1.0 / self._state.step_count)
            return Hint(text="more" if action.value < self._number else "less")

        @property
        def state(self) -> State:
            return self._state

    return create_app(Number, Guess, Hint, env_name="number", max_concurrent_envs=sessions)


if __name__ == "__main__":
    kind, directory, sessions = sys.argv[1:]
    serve({"echo": echo, "number": number}[kind](directory, int(sessions)))
