"""Table row of a trajectory, however it ended."""

from __future__ import annotations

from dataclasses import dataclass

from kuberoll_workers.data.record import FailureRecord, TrajectoryKey, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import Outcome
from kuberoll_workers.data.tracebacks import location
from kuberoll_workers.output.precedence import EndedRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow:
    """Table row of a trajectory.

    Attributes:
        reward: Total reward; None for a failure.
        generation_seconds, environment_seconds: Sums over all turns; None if not recorded.
        cause: Kind, stage and cause of a failure.
        location: Where the code of an environment failed, `file:line in function`; empty if unknown.
    """

    key: TrajectoryKey
    environment: str
    outcome: Outcome
    reward: float | None
    turns: int
    prompt_tokens: int
    generated_tokens: int
    environment_tokens: int
    generation_seconds: float | None = None
    environment_seconds: float | None = None
    cause: tuple[str, str, str] | None = None
    location: str = ""

    @property
    def name(self) -> str:
        """Display name, `task.rollout`."""
        return f"{self.key.task_index}.{self.key.rollout_index}"

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens + self.environment_tokens


def row_of(record: EndedRecord) -> TrajectoryRow:
    """Table row of a trajectory."""
    if isinstance(record, FailureRecord):
        return _failed(record)
    generation = environment = None
    if isinstance(record, TrajectoryRecord):
        outcome: Outcome = record.stop_reason
        generation, environment = sum(record.timing.generation_seconds), sum(record.timing.environment_seconds)
    else:
        outcome = record.reason
    return TrajectoryRow(
        key=record.key,
        environment=record.task_name,
        outcome=outcome,
        reward=record.total_reward,
        turns=record.turn_count,
        prompt_tokens=record.tokens.prompt,
        generated_tokens=record.tokens.generated,
        environment_tokens=record.tokens.environment,
        generation_seconds=generation,
        environment_seconds=environment,
    )


def _failed(record: FailureRecord) -> TrajectoryRow:
    prompt = generated = environment = 0
    for message in record.messages:
        if message.turn == 0:
            prompt += len(message.token_ids)
        elif message.sampled:
            generated += len(message.token_ids)
        else:
            environment += len(message.token_ids)
    return TrajectoryRow(
        key=record.key,
        environment=record.task_name,
        outcome="failed",
        reward=None,
        turns=record.turn_count,
        prompt_tokens=prompt,
        generated_tokens=generated,
        environment_tokens=environment,
        cause=(record.kind, record.stage, record.cause),
        location=location(record.frames or ()),
    )
