"""A trace of a run that was made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.simulation.trace import TraceTrajectory, Turn


@dataclass(frozen=True, slots=True)
class Recording:
    """What was made of a run.

    Attributes:
        left_out: Number of trajectories that are not in the trace, by reason.
    """

    trajectories: list[TraceTrajectory]
    left_out: dict[str, int]


def record_run(records: Iterable[EndedRecord]) -> Recording:
    """Make a trace of a run's trajectories, ordered by group and sample.

    Trajectories that failed or were dropped have no times of their turns, and are left out. Of an agent's trajectory
    only its own path is recorded.
    """
    found: list[TraceTrajectory] = []
    left_out: defaultdict[str, int] = defaultdict(int)
    for record in records:
        if not isinstance(record, TrajectoryRecord):
            left_out["failed or dropped"] += 1
        elif not record.turn_count:
            left_out["without a turn"] += 1
        else:
            if record.branches:
                left_out["branches of agents, of which only the own path is taken"] += 1
            found.append(trace_of(record))
    found.sort(key=lambda trajectory: (trajectory.group, trajectory.sample))
    prompts: dict[int, int] = {}
    # Messages that an environment's reset added may differ between the samples of a group.
    alike = [item for item in found if prompts.setdefault(item.group, item.prompt) == item.prompt]
    if len(alike) < len(found):
        left_out["with a longer or shorter prompt than the first one of their group"] = len(found) - len(alike)
    return Recording(alike, dict(left_out))


def trace_of(record: TrajectoryRecord) -> TraceTrajectory:
    """The numbers of a finished trajectory.

    Raises:
        ValueError: Its times are not one for each turn.
    """
    places = [number for number, message in enumerate(record.messages) if message.sampled]
    lengths = [len(message.token_ids) for message in record.messages]
    timing = record.timing
    if not len(places) == len(timing.generation_seconds) == len(timing.environment_seconds):
        raise ValueError(
            f"trajectory {tuple(record.key)}: {len(places)} responses, but {len(timing.generation_seconds)} and "
            f"{len(timing.environment_seconds)} times of turns"
        )
    turns = tuple(
        Turn(lengths[here], sum(lengths[here + 1 : after]), round(generating, 6), round(stepping, 6))
        for (here, after), generating, stepping in zip(
            pairwise([*places, len(lengths)]), timing.generation_seconds, timing.environment_seconds, strict=True
        )
    )
    return TraceTrajectory(
        group=record.task_index,
        sample=record.rollout_index,
        environment=record.task_name,
        prompt=max(1, record.tokens.prompt),
        turns=turns,
    )
