"""Player of the agent servers of NeMo Gym, which roll samples out themselves."""

from __future__ import annotations

import asyncio
import functools
import time

from kuberoll_api.model.environments import Environment
from kuberoll_workers.adapters.nemo_gym_rollouts import gym_request, gym_trajectory
from kuberoll_workers.data.messages import chat_message, token_array
from kuberoll_workers.environments.outcome import EnvironmentFault, EpisodeLost
from kuberoll_workers.rollouts.agent_player import AgentLost, AgentPlayer
from kuberoll_workers.rollouts.failures import failure_of
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.player import PlayerFactory
from kuberoll_workers.rollouts.trajectory import Trajectory


class GymPlayer(AgentPlayer):
    """Player of one environment of agent servers."""

    async def attempt(self, flight: InFlight, tries: int) -> Trajectory:
        """Have a server roll the sample out; see `AgentPlayer.attempt`."""
        sample, settings, tokenizer = flight.sample, self.parts.settings, self.parts.tokenizer
        environment = self.parts.environments[sample.prompt.task_name]
        messages = [chat_message(message) for message in sample.prompt.messages]
        request = gym_request(sample, settings)
        began = time.time()
        flight.metrics.stepping += 1
        try:
            outcome = await environment.step(messages, request)
        except EpisodeLost as lost:
            raise AgentLost(lost) from lost
        finally:
            flight.metrics.stepping -= 1
        convert = functools.partial(
            gym_trajectory,
            row=request["row"],
            began=began,
            ended=time.time(),
            decode=lambda ids: tokenizer.decode(token_array(ids)),
        )
        try:
            return await asyncio.to_thread(convert, sample, settings, outcome)
        except EnvironmentFault as fault:
            # The server has answered, and would answer in the same form again.
            raise failure_of(fault, stage="environment", tries=tries + 1) from fault


def player_of(_spec: Environment) -> PlayerFactory:
    """The player of an environment of agent servers."""
    return GymPlayer
