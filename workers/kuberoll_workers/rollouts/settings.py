"""What the loop needs to know, apart from the policy, the environments and the samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kuberoll_workers.policy.interface import SamplingParameters

Scheduling = Literal["Concurrent", "Lockstep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Tries of one operation within its turn, and the waits between them (seconds, doubling, jittered)."""

    generation_attempts: int = 30
    environment_attempts: int = 2
    backoff_seconds: float = 0.5
    max_backoff_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Settings of a rollout.

    Attributes:
        max_sequence_length: Most tokens of a trajectory, the engine's window at most.
        concurrency: Trajectories in flight; with Lockstep the size of a batch.
        sampling: Defaults; a prompt may override each. `stop` is for first turns whose prompt names none.
        generation_seconds: Time limit of one generation request.
        turn_seconds: Time limit of one turn, its retries included, the wait for others in Lockstep not; None: none.
        trajectory_seconds: Time limit of one trajectory; None: none.
        foreign_policy: The policy has another interface behind it, which is not told `max_tokens` and may give no
            log-probabilities: neither is demanded of it. A response that passes the window is kept whole and ends
            its trajectory.
    """

    max_turns: int
    max_sequence_length: int
    concurrency: int
    sampling: SamplingParameters
    scheduling: Scheduling = "Concurrent"
    retries: RetryPolicy = RetryPolicy()
    generation_seconds: float = 600.0
    turn_seconds: float | None = None
    trajectory_seconds: float | None = None
    foreign_policy: bool = False


def sampling_of(defaults: SamplingParameters, overrides: Mapping[str, Any]) -> SamplingParameters:
    """The sampling of one prompt: the job's settings with the row's over them; `greedy: true` is temperature 0."""
    settings = dict(overrides)
    greedy = settings.pop("greedy", False)
    if "stop" in settings:
        settings["stop"] = tuple(settings["stop"])
    merged = msgspec.structs.replace(defaults, **settings)
    return msgspec.structs.replace(merged, temperature=0.0, top_k=-1, top_p=1.0) if greedy else merged
