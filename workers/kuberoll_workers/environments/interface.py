"""The environment interface, compatible with NeMo RL's `nemo_rl.environments.interfaces`."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ChatMessage = dict[str, Any]
"""`{"role": ..., "content": ...}`, as in chat APIs."""

Metadata = dict[str, Any] | None


class EnvironmentReturn(NamedTuple):
    """What one `step` returns; every element has one entry per trajectory, in the order of the inputs."""

    observations: Sequence[Mapping[str, str]]
    """The environment's messages, `{"role", "content"}`; an empty content adds no tokens."""
    metadata: Sequence[Metadata]
    """The new episode states; `None` keeps the old one."""
    next_stop_strings: Sequence[Sequence[str] | None] | None
    """Stop strings of each trajectory's next generation; `None` clears them."""
    rewards: Any
    """Rewards of this turn: a sequence, array or tensor of numbers, or a dict of named ones (their sum counts)."""
    terminateds: Any
    """Whether each episode ended: a sequence, array or tensor of booleans."""
    answers: Sequence[str | None] | None = None
    """Extracted answers, for majority voting; optional."""


class EnvironmentInterface(abc.ABC):
    """An environment that steps a batch of episodes.

    Instances hold no episode state: everything an episode needs lives in its `metadata`, a JSON object. That is
    what lets a step be retried, a trajectory move to another worker and a killed run resume.
    The constructor takes one argument, the `config` object of the RolloutJob's environment.
    """

    @abc.abstractmethod
    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        """Judge the last message of each log and answer it.

        Args:
            message_log_batch: One chat log per trajectory, from the prompt to the policy's newest message.
            metadata: One episode state per trajectory, in the same order; not to be changed in place.
        """

    @abc.abstractmethod
    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Called once, after the run, with all finished trajectories of this environment.

        Args:
            batch: A mapping of columns: `message_log`, `extra_env_info`, `task_name`, `idx`, `total_reward`,
                `stop_reason`, `turn_count`; one entry per trajectory.

        Returns:
            The batch (changed or not) and the environment's own metrics.
        """

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Make `count` dataset rows, the same ones for the same seed; optional.

        Returns:
            Rows with `messages` (the prompt's chat messages) and optionally `metadata` (the episode's first state),
            `stop_strings` (of the first turn) and `idx`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generator: give the job a dataset.source.uri or rows")
