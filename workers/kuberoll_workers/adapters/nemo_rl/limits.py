"""What NeMo RL's functions have no parameters for: tries, time limits, and how much goes on at once."""

from __future__ import annotations

from dataclasses import dataclass

from kuberoll_workers.policy.interface import SamplingParameters
from kuberoll_workers.rollouts.settings import RetryPolicy, RolloutSettings, Scheduling


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Bounds of a rollout; the defaults are wide, and end what would otherwise hang for ever.

    Attributes:
        generation_attempts, environment_attempts: Tries of one generation or environment step. Only what another try
            may mend is tried again: not a bug in the policy's code, and not a row that cannot be used.
        backoff_seconds: Before the second try; doubles with each, at most 30 s.
        generation_seconds: One generation: in `run_multi_turn_rollout` of the whole batch.
        step_seconds: One environment call.
        trajectory_seconds: One trajectory; None: no limit.
        concurrency: Trajectories in flight in `run_async_multi_turn_rollout`; None: all of the batch.
        environment_calls: Calls in flight to one Ray actor in `run_async_multi_turn_rollout`; samples that wait travel
            together in the next one.
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
    limits: RolloutLimits, *, scheduling: Scheduling, batch_size: int, max_turns: int, max_sequence_length: int
) -> RolloutSettings:
    """The loop's settings for one call."""
    everything = scheduling == "Lockstep" or limits.concurrency is None
    return RolloutSettings(
        max_turns=max_turns,
        max_sequence_length=max_sequence_length,
        concurrency=max(1, batch_size if everything else min(batch_size, limits.concurrency or 1)),
        # How many tokens it generates, and how it draws them, is the policy's own affair.
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
