"""Settings of the rollout loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kuberoll_api.model.generation import Sampling
from kuberoll_api.model.sampling_fields import AT_ZERO
from kuberoll_workers.data.sampling import LEAST_TEMPERATURE, Distribution
from kuberoll_workers.policy.interface import SamplingParameters, StructuredOutputs

Scheduling = Literal["Concurrent", "Lockstep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Attempts per operation within a turn, and the backoff between them in seconds, doubled and jittered."""

    generation_attempts: int = 30
    environment_attempts: int = 2
    backoff_seconds: float = 0.5
    max_backoff_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Settings of a rollout.

    Attributes:
        max_sequence_length: Maximum number of tokens per trajectory, not more than the engine's window.
        concurrency: Maximum number of trajectories in flight; with Lockstep, the batch size.
        sampling: Defaults that a prompt may override. `stop` applies to first turns whose prompt has none.
        generation_seconds: Time limit of one generation request.
        turn_seconds: Time limit of one turn, with retries, without the wait for others in Lockstep; None: no limit.
        trajectory_seconds: Time limit of one trajectory; None: no limit.
        rendering: Key of what shapes tokens beside the row, of `provenance.rendering_of`: a trajectory that was
            interrupted under another one starts over.
        usual: The distribution that the run's manifest has for responses that say none; None: each says its own.
        engine_parses_calls: The engine parses calls of tools, by the parser of its model.
        foreign_policy: The policy has another interface behind it, which does not receive `max_tokens` and may return
            no log-probabilities, so neither is checked. A response that exceeds the window is kept whole and ends
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
    engine_parses_calls: bool = False
    rendering: bytes = b""
    usual: Distribution | None = None

    @property
    def outage_seconds(self) -> float:
        """Longest outage of the policy that a request waits out: the time limits of all its attempts."""
        return self.retries.generation_attempts * self.generation_seconds


def job_sampling(sampling: Sampling) -> SamplingParameters:
    """A job's sampling, for rows that set none."""
    # Each sample has its own seed.
    given = sampling.model_dump(by_alias=False, exclude={"seed", "override", "structured_outputs"})
    if sampling.structured_outputs is not None:
        given["structured_outputs"] = sampling.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    return sampling_of(SamplingParameters(max_tokens=sampling.max_tokens), given)


def sampling_of(defaults: SamplingParameters, overrides: Mapping[str, Any]) -> SamplingParameters:
    """Sampling of one prompt: the job's settings, overridden by the row's; `greedy: true` means temperature 0.

    Args:
        overrides: Settings by their snake_case names, as plain data.
    """
    settings = {name: value for name, value in overrides.items() if value is not None}
    if not settings:
        return defaults
    greedy = settings.pop("greedy", False)
    for name in ("stop", "stop_token_ids"):
        if name in settings:
            settings[name] = tuple(settings[name])
    if "structured_outputs" in settings:
        settings["structured_outputs"] = msgspec.convert(settings["structured_outputs"], StructuredOutputs)
    merged = msgspec.structs.replace(defaults, **settings)
    if greedy:
        return msgspec.structs.replace(merged, temperature=0.0, **AT_ZERO)
    if 0 < merged.temperature < LEAST_TEMPERATURE:
        # As vLLM would, so that what is stored is what was used, with any engine.
        return msgspec.structs.replace(merged, temperature=LEAST_TEMPERATURE)
    return merged
