"""What the loop tells its metrics; `kuberoll_workers.telemetry` publishes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kuberoll_workers.data.incidents import Incident


class EnvironmentMetrics(Protocol):
    """Metrics of the trajectories of one environment.

    Attributes:
        generating, stepping: Number of trajectories that wait for generation, or for the environment, now.
    """

    generating: int
    stepping: int

    def record_response(self, *, prompt: int, cached: int, generated: int) -> None:
        """Count a response: prompt tokens sent, those of them reused by the engine, and generated tokens."""
        ...

    def record_turn(
        self,
        turn: int,
        *,
        waiting_seconds: float,
        generation_seconds: float,
        environment_seconds: float,
        observed: int,
    ) -> None:
        """Count a finished turn, numbered from 1; `observed` is the number of tokens of its observation."""
        ...

    def record_finish(self, *, stop_reason: str, reward: float, turns: int, seconds: float) -> None:
        """Count a finished trajectory."""
        ...

    def record_failure(self, *, kind: str, stage: str, seconds: float, tokens: int) -> None:
        """Count a trajectory that failed permanently, and the time and generated tokens that it has cost."""
        ...

    def record_drop(self, *, reason: str, tokens: int) -> None:
        """Count a dropped trajectory and its generated tokens."""
        ...

    def record_prefix_violation(self) -> None:
        """Count a trajectory whose context was not the concatenation of its messages."""
        ...

    def record_resume(self, turns: int) -> None:
        """Count the turns of a resumed trajectory from before the interruption."""
        ...

    def record_episode(self) -> None:
        """Count an episode that began."""
        ...

    def record_close(self, done: bool) -> None:
        """Count an episode that was closed; `done` is False if that failed."""
        ...

    def record_recovery(self, recovery: str) -> None:
        """Count an episode that was lost and recovered, by how."""
        ...

    def record_calls(self, continuity: Mapping[str, int]) -> None:
        """Count an agent's calls by how each continued the ones before it."""
        ...

    def record_retry(self, stage: str) -> None:
        """Count a failed attempt that is followed by another."""
        ...

    def record_incident(self, incident: Incident) -> None:
        """Count what went wrong with a trajectory that goes on."""
        ...

    def flush_if_due(self) -> None:
        """Publish the counts, if that has not been done for a while; called whenever a trajectory ends."""
        ...


class RolloutMetrics(Protocol):
    """Metrics of a run."""

    def environment(self, name: str) -> EnvironmentMetrics:
        """The metrics of one environment."""
        ...

    def flush(self) -> None:
        """Publish the counts."""
        ...
