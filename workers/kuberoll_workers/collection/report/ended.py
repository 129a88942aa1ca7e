"""Every trajectory of a run once, however it ended, and the row that a table of them has for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from kuberoll_workers.collection.keys import KeySet
from kuberoll_workers.collection.run_files import RunFiles
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryKey, TrajectoryRecord

EndedRecord = TrajectoryRecord | FailureRecord | DroppedRecord
Outcome = Literal["terminated", "truncated", "max_turns", "failed", "oversampled", "filtered"]
"""How a trajectory ended: its stop reason, or why it was dropped."""

OUTCOMES: tuple[Outcome, ...] = ("terminated", "truncated", "max_turns", "failed", "oversampled", "filtered")

_Again = TypeVar("_Again", FailureRecord, DroppedRecord)


def ended(run: RunFiles) -> Iterator[EndedRecord]:
    """Every trajectory once: the finished ones first, then those that failed for good, then those dropped.

    A trajectory that failed or was dropped and finished later is finished; otherwise its latest attempt counts.
    Streamed: memory is some 70 bytes a trajectory, for their keys; whoever stops early has read no more.

    Raises:
        RecordError: A line is not what it should be, with file and line.
    """
    finished = KeySet()
    for record in run.trajectories():
        finished.add(record.key)
        yield record
    failed, unwanted = _latest(run.failures(), finished), _latest(run.dropped(), finished)
    for key in failed.keys() & unwanted.keys():
        earlier = failed if unwanted[key].attempt > failed[key].attempt else unwanted
        del earlier[key]
    yield from _at(run.failures(), failed)
    yield from _at(run.dropped(), unwanted)


class _Place(NamedTuple):
    attempt: int
    number: int


def _latest(records: Iterable[FailureRecord | DroppedRecord], finished: KeySet) -> dict[TrajectoryKey, _Place]:
    """Where the latest record is of each trajectory that did not finish."""
    latest: dict[TrajectoryKey, _Place] = {}
    for number, record in enumerate(records):
        if record.key not in finished:
            latest[record.key] = max(_Place(record.attempt, number), latest.get(record.key, _Place(-1, -1)))
    return latest


def _at(records: Iterable[_Again], latest: Mapping[TrajectoryKey, _Place]) -> Iterator[_Again]:
    """Those of the records; read once more, so that none has to be kept until it is known whether it counts."""
    numbers = {place.number for place in latest.values()}
    return (record for number, record in enumerate(records) if number in numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a table says of a trajectory.

    Attributes:
        reward: Of what was counted; None of a failure, which has none.
        generation_seconds, environment_seconds: Over all turns; None where they are not recorded.
        cause: Of a failure: its kind, stage and cause.
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

    @property
    def name(self) -> str:
        """What people call it: `task.rollout`."""
        return f"{self.key.task_index}.{self.key.rollout_index}"

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens + self.environment_tokens


def row_of(record: EndedRecord) -> Row:
    """The row of a trajectory."""
    if isinstance(record, FailureRecord):
        return _failed(record)
    generation = environment = None
    if isinstance(record, TrajectoryRecord):
        outcome: Outcome = record.stop_reason
        generation, environment = sum(record.timing.generation_seconds), sum(record.timing.environment_seconds)
    else:
        outcome = record.reason
    return Row(
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


def _failed(record: FailureRecord) -> Row:
    prompt = generated = environment = 0
    for message in record.messages:
        if message.turn == 0:
            prompt += len(message.token_ids)
        elif message.role == "assistant":
            generated += len(message.token_ids)
        else:
            environment += len(message.token_ids)
    return Row(
        key=record.key,
        environment=record.task_name,
        outcome="failed",
        reward=None,
        turns=record.turn_count,
        prompt_tokens=prompt,
        generated_tokens=generated,
        environment_tokens=environment,
        cause=(record.kind, record.stage, record.cause),
    )
