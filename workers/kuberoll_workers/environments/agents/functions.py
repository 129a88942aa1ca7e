"""Agents that are Python functions or classes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, Final

from kuberoll_workers.environments.agents.episode import AgentEpisode, AgentResult, result_of
from kuberoll_workers.environments.agents.proxies import without_proxy
from kuberoll_workers.environments.registry import UnusableEnvironment, load

# Where the state of an episode has its object; another attempt has the same id, and a state of its own.
_OBJECT: Final = "kuberoll.agent"


class FunctionPhases:
    """The phases of an agent at an entrypoint: a coroutine function, or a class whose objects are one episode each."""

    def __init__(self, entrypoint: str, config: Mapping[str, Any]) -> None:
        """
        Args:
            config: The environment's, which the class method `check` of an agent may refuse.

        Raises:
            UnusableEnvironment: It cannot be imported, is no agent, or refuses the config.
        """
        self._found = load(entrypoint)
        run = getattr(self._found, "run", None) if inspect.isclass(self._found) else self._found
        if not inspect.iscoroutinefunction(run):
            raise UnusableEnvironment(
                f"agent.entrypoint: {entrypoint} is no agent: it must be a coroutine function (async def) that takes "
                "an AgentEpisode, or a class with `async def run(self, episode)`"
            )
        if inspect.isclass(self._found) and (check := getattr(self._found, "check", None)) is not None:
            check(config)

    async def setup(self, episode: AgentEpisode) -> None:
        """Make the episode's object, and call its `setup`."""
        # The clients that it makes read them; its session is at a replica of the policy, which no proxy reaches.
        os.environ.update(without_proxy(os.environ, episode.base_url))
        if inspect.isclass(self._found):
            agent = episode.state[_OBJECT] = self._found()
            if (setup := getattr(agent, "setup", None)) is not None:
                await setup(episode)

    async def run(self, episode: AgentEpisode) -> AgentResult | None:
        """Call the function, or `run`.

        Raises:
            InvalidResult: It returned no result, and has no `score`.
        """
        agent = episode.state.get(_OBJECT)
        returned = await self.call(episode)
        if returned is None and hasattr(agent, "score"):
            return None
        return result_of(returned, "the agent" if agent is None else "run")

    async def call(self, episode: AgentEpisode) -> Any:
        """Call the function, or `run`; returns what it returns."""
        agent = episode.state.get(_OBJECT)
        return await (self._found(episode) if agent is None else agent.run(episode))

    async def score(self, episode: AgentEpisode, result: AgentResult | None) -> AgentResult:
        """Call `score` with the result of `run`, if there is such a method.

        Raises:
            InvalidResult: It returned no result.
        """
        score = getattr(episode.state.get(_OBJECT), "score", None)
        if score is None:
            assert result is not None
            return result
        return result_of(await score(episode, result), "score")

    async def close(self, episode: AgentEpisode) -> None:
        """Call `close`."""
        close = getattr(episode.state.get(_OBJECT), "close", None)
        if close is not None:
            await close(episode)
