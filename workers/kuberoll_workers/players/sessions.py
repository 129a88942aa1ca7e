"""Player of agents that call the policy by themselves, each episode in a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import time
from typing import Any, Final

from kuberoll_api.model.environments import Environment
from kuberoll_workers.data.messages import chat_message
from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.environments.agents.request import AgentRequest
from kuberoll_workers.environments.outcome import EnvironmentFault, EpisodeLost, StepOutcome
from kuberoll_workers.players.session_trajectories import NothingSampled, agent_trajectory
from kuberoll_workers.policy.agent_sessions import AgentPolicy, AgentSession, ClosedSession, SessionSettings
from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.rollouts.agent_player import AgentLost, AgentPlayer
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.player import Parts, PlayerFactory
from kuberoll_workers.rollouts.settings import RolloutSettings, sampling_of
from kuberoll_workers.rollouts.trajectory import Trajectory

_SPARE_SECONDS: Final = 600.0


class SessionPlayer(AgentPlayer):
    """Player of the agents of one environment."""

    def __init__(self, parts: Parts, *, seconds: float) -> None:
        """`seconds` is the maximum duration of an episode."""
        super().__init__(parts)
        self._seconds = seconds
        # Sessions that are being closed.
        self._closing: set[asyncio.Future[None]] = set()

    async def attempt(self, flight: InFlight, tries: int) -> Trajectory:  # noqa: ARG002
        """Have the agent play, in a session that is closed at its end; see `AgentPlayer.attempt`."""
        policy = self.parts.policy
        if not isinstance(policy, AgentPolicy):
            raise TrajectoryFailed(
                "agents need a policy with sessions, which this one has not", reason="JobRefused", stage="generation"
            )
        sample = flight.sample
        environment = self.parts.environments[sample.prompt.task_name]
        session = await self._opened(policy, flight)
        flight.metrics.stepping += 1
        began = time.monotonic()
        try:
            messages = [chat_message(message) for message in sample.prompt.messages]
            async with policy.attend_session(session):
                outcome = await environment.step(messages, agent_request(sample, session))
        except PolicyUnavailable as lost:
            raise AgentLost(lost) from lost
        except EpisodeLost as lost:
            # The agent may go on where nobody reaches it: never in the session of the next one.
            self._close_later(policy, session)
            raise AgentLost(lost) from lost
        except EnvironmentFault as fault:
            closed = await _closed(policy, session, f"; the agent says: {fault}")
            # What it has done so far is in the record of its failure.
            with contextlib.suppress(NothingSampled):
                self.take(flight, await self._trajectory(sample, closed, None, 0.0))
            raise
        except BaseException:
            # Stopped from outside: nobody waits for what was sampled.
            self._close_later(policy, session)
            raise
        finally:
            flight.metrics.stepping -= 1
        # Whatever it made of a missing answer, an episode without that is another one.
        closed = await _closed(policy, session)
        return await self._trajectory(sample, closed, outcome, time.monotonic() - began)

    async def _opened(self, policy: AgentPolicy, flight: InFlight) -> AgentSession:
        sample = flight.sample
        settings = session_settings(sample, self.parts.settings, seconds=self._seconds)
        flight.session = name = sample.episode_id
        return await self.parts.attempts.make(flight, "generation", lambda _: policy.open_session(name, settings))

    async def _trajectory(
        self, sample: Sample, closed: ClosedSession, outcome: StepOutcome | None, seconds: float
    ) -> Trajectory:
        parts = self.parts
        return await asyncio.to_thread(
            agent_trajectory, sample, parts.settings, closed, outcome, parts.tokenizer.decode, seconds=seconds
        )

    def _close_later(self, policy: AgentPolicy, session: AgentSession) -> None:
        closing = asyncio.ensure_future(_close(policy, session))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def player_of(spec: Environment) -> PlayerFactory:
    """The player of an environment whose agents have sessions."""
    return functools.partial(SessionPlayer, seconds=spec.call_seconds)


def session_settings(sample: Sample, settings: RolloutSettings, *, seconds: float) -> SessionSettings:
    """Settings of the session of a sample's agent.

    Args:
        seconds: Maximum duration of its episode.
    """
    return SessionSettings(
        # It is closed when the agent has ended; this is for a worker that is gone, whose sessions take places.
        idle_seconds=min(86_400.0, seconds + _SPARE_SECONDS),
        sampling=sampling_of(settings.sampling, sample.prompt.sampling),
        seed=sample.seed,
        max_calls=settings.max_turns,
        max_sequence_length=settings.max_sequence_length,
    )


def agent_request(sample: Sample, session: AgentSession) -> dict[str, Any]:
    """What the environment of a sample's agent is given: the row, and the session."""
    prompt = sample.prompt
    return AgentRequest(
        id=sample.episode_id,
        metadata=copy.deepcopy(prompt.metadata or {}),
        tools=None if prompt.tools is None else [dict(tool) for tool in prompt.tools],
        seed=sample.seed,
        base_url=session.openai_base_url,
        anthropic_base_url=session.anthropic_base_url,
        token=session.token,
        model=session.model,
    ).encode()


async def _closed(policy: AgentPolicy, session: AgentSession, reason: str = "") -> ClosedSession:
    """Close a session.

    Args:
        reason: Added to the message of what was lost.

    Raises:
        AgentLost: Its replica is gone, or the engine failed in the middle of a response that was not asked for again.
    """
    try:
        closed = await policy.close_session(session)
    except PolicyUnavailable as error:
        raise AgentLost(PolicyUnavailable(f"{error}{reason}")) from error
    if closed.aborted:
        raise AgentLost(
            PolicyUnavailable(
                f"the engine failed in the middle of {closed.aborted} of the responses, and the agent did not ask "
                f"again{reason}"
            )
        )
    return closed


async def _close(policy: AgentPolicy, session: AgentSession) -> None:
    with contextlib.suppress(PolicyUnavailable):
        await policy.close_session(session)
