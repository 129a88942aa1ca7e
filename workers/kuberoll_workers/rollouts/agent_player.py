"""Player of agents, which play a trajectory whole: what was sampled is taken from what they leave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import ClassVar

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.environments.outcome import EpisodeLost
from kuberoll_workers.policy.interface import PolicyUnavailable, UnknownTokens
from kuberoll_workers.policy.responses import check_ids
from kuberoll_workers.rollouts.episodes import MAX_RECOVERIES
from kuberoll_workers.rollouts.failures import failure_of
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.metrics import EnvironmentMetrics
from kuberoll_workers.rollouts.player import Barrier, Parts
from kuberoll_workers.rollouts.trajectory import Trajectory


class AgentLost(Exception):
    """The agent was lost with its replica or its server, through no fault of its own: it plays again.

    Attributes:
        cause: What was lost; it fails the trajectory when that was so too often.
    """

    def __init__(self, cause: PolicyUnavailable | EpisodeLost) -> None:
        super().__init__(str(cause))
        self.cause = cause


class AgentPlayer(ABC):
    """Player of agents: retries, recovery, checks and metrics around `attempt`."""

    scores_groups: ClassVar[bool] = False

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    @abstractmethod
    async def attempt(self, flight: InFlight, tries: int) -> Trajectory:
        """Have the agent play the trajectory of a flight's sample from its beginning.

        Args:
            tries: Number of attempts that failed before.

        Raises:
            AgentLost: It was lost through no fault of its own.
            EnvironmentFault, PolicyUnavailable, TrajectoryFailed: The attempt failed.
        """

    async def play(self, flight: InFlight, barrier: Barrier | None = None) -> None:  # noqa: ARG002
        """Play a trajectory whole; it meets nobody at the barrier.

        Raises:
            TrajectoryFailed: After the last attempt.
        """

        # What the agent knows is not in its turns.
        flight.restorable = False
        seen = flight.trajectory

        def thrown_away() -> int:
            nonlocal seen
            if (last := flight.trajectory) is seen:
                # The attempt has left none.
                return 0
            seen = last
            return last.generated_tokens

        async def attempt(tries: int) -> None:
            while True:
                try:
                    self.take(flight, await self.attempt(flight, tries))
                except AgentLost as lost:
                    flight.losses += 1
                    if flight.losses > MAX_RECOVERIES:
                        raise lost.cause from lost
                    flight.metrics.record_recovery("restart")
                    flight.note_restart(lost.cause.cause, str(lost), stage="environment", tokens=thrown_away())
                else:
                    return

        await self.parts.attempts.make(flight, "environment", attempt, tokens=thrown_away)
        flight.trajectory.check_tokens()

    def take(self, flight: InFlight, trajectory: Trajectory) -> None:
        """Make what an agent has played the flight's trajectory, and count it.

        Raises:
            TrajectoryFailed: It has ids that are no tokens.
        """
        flight.trajectory = trajectory
        flight.metrics.record_calls(trajectory.continuity or {})
        _count(flight.metrics, trajectory)
        branches = [message for branch in trajectory.branches or () for message in branch.messages]
        try:
            for message in (*trajectory.messages, *branches):
                if message.sampled:
                    check_ids(token_array(message.token_ids), self.parts.tokenizer.vocabulary)
        except UnknownTokens as error:
            raise failure_of(error, stage="generation", tries=1) from error


def _count(metrics: EnvironmentMetrics, trajectory: Trajectory) -> None:
    """Count an agent's calls as turns; those of its branches as generated tokens only."""
    messages = trajectory.messages
    _count_responses(metrics, messages, [place for place, message in enumerate(messages) if message.sampled])
    for index in range(trajectory.complete_turns):
        _, *observed = trajectory.turn_messages(index)
        metrics.record_turn(
            index + 1,
            waiting_seconds=0.0,
            generation_seconds=trajectory.generation_seconds[index],
            environment_seconds=trajectory.environment_seconds[index],
            observed=sum(len(messages[place].token_ids) for place in observed),
        )
    for branch in trajectory.branches or ():
        _count_responses(metrics, branch.messages, branch.learn)


def _count_responses(metrics: EnvironmentMetrics, messages: Sequence[Message], responses: Container[int]) -> None:
    read = 0
    for place, message in enumerate(messages):
        if place in responses:
            metrics.record_response(prompt=read, cached=0, generated=len(message.token_ids))
        read += len(message.token_ids)
