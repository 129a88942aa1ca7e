"""Players: a player is one way of playing a trajectory. The loop admits, limits, scores and stores around all of them.

Each environment has one: turn by turn (`turn_player`), or as an agent that plays alone (`agent_player`). Another way is
another class with `play`; who starts a run gives its factory to the `Rollout`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from kuberoll_workers.data.tokenization import Tokenizer
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.interface import Policy
from kuberoll_workers.rollouts.attempts import Attempts
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.settings import RolloutSettings

Barrier = Callable[[], Awaitable[None]]
"""Awaited at the end of each phase of a turn: until all trajectories of the batch are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What players play with.

    Attributes:
        environments: By task name.
    """

    policy: Policy
    environments: Mapping[str, EnvironmentRunner]
    tokenizer: Tokenizer
    settings: RolloutSettings
    attempts: Attempts


class Player(Protocol):
    """One way of playing a trajectory.

    Attributes:
        scores_groups: Whether environments score prompt groups of its trajectories.
    """

    scores_groups: ClassVar[bool]

    async def play(self, flight: InFlight, barrier: Barrier | None = None) -> None:
        """Play a trajectory until it is over: finished, or stopped by somebody else.

        Args:
            barrier: With Lockstep, where the trajectories of a batch meet; None: each goes at its own pace.

        Raises:
            TrajectoryFailed: It failed permanently.
        """
        ...


PlayerFactory = Callable[[Parts], Player]
