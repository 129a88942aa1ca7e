"""Limits that NeMo RL's functions have no parameters for: attempts, time limits and concurrency."""

from __future__ import annotations

from dataclasses import dataclass

from kuberoll_workers.policy.interface import SamplingParameters
from kuberoll_workers.rollouts.settings import RetryPolicy, RolloutSettings, Scheduling

_NO_LIMIT = 999999
"""NeMo RL's default of `max_rollout_turns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Limits of a rollout; the defaults are wide and only end what would otherwise hang for ever.

    Attributes:
        generation_attempts, environment_attempts: Attempts of one generation or environment step. Only temporary errors
            are retried: not a bug in the policy's code, and not an unusable row.
        backoff_seconds: Wait before the second attempt; doubled each time, at most 30 s.
        generation_seconds: Time limit of one generation; in `run_multi_turn_rollout`, of the whole batch.
        step_seconds: Time limit of one environment call.
        trajectory_seconds: Time limit of one trajectory; None: no limit.
        concurrency: Trajectories in flight in `run_async_multi_turn_rollout`; None: all of the batch.
        environment_calls: Calls in flight to one Ray actor in `run_async_multi_turn_rollout`; waiting samples are
            batched into the next one.
    """

    generation_attempts: int = 3
    environment_attempts: int = 2
    backoff_seconds: float = 0.5
    generation_seconds: float = 3600.0
    step_seconds: float = 1800.0
    trajectory_seconds: float | None = None
    concurrency: int | None = None
    environment_calls: int = 8


def settings_of(
    limits: RolloutLimits, *, scheduling: Scheduling, batch_size: int, max_turns: int | None, max_sequence_length: int
) -> RolloutSettings:
    """The loop's settings for one call."""
    everything = scheduling == "Lockstep" or limits.concurrency is None
    return RolloutSettings(
        max_turns=_NO_LIMIT if max_turns is None else max_turns,
        max_sequence_length=max_sequence_length,
        concurrency=max(1, batch_size if everything else min(batch_size, limits.concurrency or 1)),
        # The policy's own configuration decides the sampling and the length of responses.
        sampling=SamplingParameters(max_tokens=max_sequence_length),
        scheduling=scheduling,
        retries=RetryPolicy(
            generation_attempts=limits.generation_attempts,
            environment_attempts=limits.environment_attempts,
            backoff_seconds=limits.backoff_seconds,
        ),
        generation_seconds=limits.generation_seconds,
        trajectory_seconds=limits.trajectory_seconds,
        foreign_policy=True,
    )
