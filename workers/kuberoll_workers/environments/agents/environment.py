"""The environment that runs agents: one step is one whole episode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from kuberoll_api.model.agents import CLOSE_SECONDS, Agent, AgentTimeouts
from kuberoll_workers.environments import landlock
from kuberoll_workers.environments.agents.episode import AgentEpisode, AgentResult, InvalidResult
from kuberoll_workers.environments.agents.request import AgentRequest
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Metadata,
)
from kuberoll_workers.environments.outcome import SCALAR, StepRaised
from kuberoll_workers.environments.registry import UnusableEnvironment

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class AgentLate(StepRaised):
    """A phase of an agent exceeded its time limit."""


class Phases(Protocol):
    """The phases of an agent's episodes."""

    async def setup(self, episode: AgentEpisode) -> None:
        """Prepare the episode."""
        ...

    async def run(self, episode: AgentEpisode) -> AgentResult | None:
        """Run the agent; None: `score` has the result."""
        ...

    async def score(self, episode: AgentEpisode, result: AgentResult | None) -> AgentResult:
        """Score what the agent did."""
        ...

    async def close(self, episode: AgentEpisode) -> None:
        """Release what the episode holds; called however it ends."""
        ...


class AgentEnvironment(EnvironmentInterface):
    """Runs agents. An episode cannot be resumed: it is one call, which a retry makes again in a new session."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Load the agent.

        Args:
            config: `agent`, as in the job; `config`, the environment's own; `variables`, the names of variables
                that programs inherit in addition to the usual ones; and, where their access is to be limited,
                `access`, the fields of a `ProcessAccess`.

        Raises:
            UnusableEnvironment: Its entrypoint cannot be imported, or refuses the config.
        """
        agent = Agent.model_validate(config["agent"])
        self._config = config["config"]
        self._timeouts = agent.timeouts
        self._phases: Phases
        if agent.entrypoint is not None:
            from kuberoll_workers.environments.agents.functions import FunctionPhases

            self._phases = FunctionPhases(agent.entrypoint, self._config)
        else:
            from kuberoll_workers.environments.agents.commands import CommandPhases
            from kuberoll_workers.environments.process_access import ProcessAccess

            files = config.get("access")
            if agent.hidden is not None and agent.hidden.paths and landlock.abi() == 0:
                raise UnusableEnvironment(
                    "agent.hidden.paths: this kernel has no Landlock, without which programs read whatever this user "
                    "can; use nodes with Linux 5.13 or later, or put what is hidden into agent.hidden.metadata"
                )
            self._phases = CommandPhases(
                agent, variables=config["variables"], files=None if files is None else ProcessAccess(**files)
            )

    async def step(  # type: ignore[override]
        self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]
    ) -> EnvironmentReturn:
        """Run one episode for each request.

        Args:
            metadata: Requests, see `AgentRequest`.

        Raises:
            AgentLate: A phase exceeded its time limit.
            InvalidResult: There is no result.
        """
        results = await asyncio.gather(*map(self._play, message_log_batch, metadata))
        names = list(dict.fromkeys(name for result in results for name in _named(result)))
        rewards: Any = {name: [_named(result).get(name, 0.0) for result in results] for name in names}
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * len(results),
            metadata=[None if result.metadata is None else dict(result.metadata) for result in results],
            next_stop_strings=None,
            rewards=rewards[SCALAR] if names == [SCALAR] else rewards,
            terminateds=[True] * len(results),
            answers=[result.answer for result in results],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Leave the batch as it is: agents have no metrics of their own."""
        return batch, {}

    async def _play(self, messages: Sequence[ChatMessage], metadata: Metadata) -> AgentResult:
        request = AgentRequest.decode(metadata or {})
        episode = request.episode(messages, self._config)
        limits = self._timeouts
        try:
            await within(self._phases.setup(episode), limits, "setup")
            result = await within(self._phases.run(episode), limits, "run")
            return await within(self._phases.score(episode, result), limits, "score")
        finally:
            await self._close(episode)

    async def _close(self, episode: AgentEpisode) -> None:
        try:
            await within(self._phases.close(episode), self._timeouts, "close")
        except Exception as error:
            # It has no part in the result.
            _log.warning("episode %s could not be closed: %s: %s", episode.id, type(error).__name__, error)


def _named(result: AgentResult) -> Mapping[str, float]:
    if not isinstance(result, AgentResult):
        raise InvalidResult(f"score returned {result!r}")
    return result.reward if isinstance(result.reward, Mapping) else {SCALAR: result.reward}


async def within(phase: Awaitable[_Result], limits: AgentTimeouts, name: str) -> _Result:
    """The result of a phase.

    Args:
        name: The phase's: setup, run, score or close.

    Raises:
        AgentLate: It exceeded its time limit.
    """
    seconds = {"run": limits.run_seconds, "close": CLOSE_SECONDS}.get(name, limits.around_seconds)
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return await phase
    except TimeoutError as error:
        # The agent's own TimeoutError is not our time limit.
        if not timeout.expired():
            raise
        field = "" if name == "close" or seconds > limits.run_seconds else "agent.timeouts.runSeconds "
        limit = f"{field}({seconds:g} s)" if field else f"{seconds:g} s"
        raise AgentLate(f"{name} took longer than {limit}") from error
