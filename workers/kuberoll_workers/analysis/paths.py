"""Paths of a trajectory: its own, and those that an agent's calls made beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from kuberoll_workers.data.messages import PROMPT_TURN, Message, is_response
from kuberoll_workers.data.record import Branch, TokenCounts, TrajectoryRecord


@dataclass(slots=True)
class TrajectoryPath(TrajectoryRecord):
    """A trajectory of one path.

    Attributes:
        path: 0 for the trajectory's own path, and the number of a branch, counted from 1.
    """

    path: int = 0


def own_path(record: TrajectoryRecord) -> TrajectoryPath:
    """The trajectory without its branches."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return TrajectoryPath(**{**values, "branches": None})


def paths(record: TrajectoryRecord) -> Iterator[TrajectoryPath]:
    """All paths of a trajectory, of which each response is learned in one.

    All of a branch before its first response that no earlier path has is its prompt. It has the trajectory's reward, in
    its last turn. A branch without such a response is left out.
    """
    own = own_path(record)
    yield own
    for number, branch in enumerate(record.branches or (), start=1):
        if branch.learn:
            yield _branch_path(own, branch, number)


def _branch_path(own: TrajectoryPath, branch: Branch, number: int) -> TrajectoryPath:
    first = branch.learn[0]
    shared = branch.messages[first].turn - 1
    messages = [
        replace(message, turn=PROMPT_TURN if place < first else message.turn - shared)
        for place, message in enumerate(branch.messages)
    ]
    count = len(branch.learn)
    zeros = [0.0] * (count - 1)
    return replace(
        own,
        path=number,
        messages=messages,
        rewards=[*zeros, *own.rewards[-1:]],
        reward_parts={name: [*zeros, *parts[-1:]] for name, parts in own.reward_parts.items()},
        stop_reason="truncated" if messages[branch.learn[-1]].truncated else own.stop_reason,
        turn_count=count,
        tokens=_counts(messages),
        timing=replace(
            branch.timing,
            generation_seconds=branch.timing.generation_seconds[shared:],
            environment_seconds=branch.timing.environment_seconds[shared:],
            ended_at=branch.timing.ended_at[shared:],
        ),
    )


def shared_messages(branch: Branch) -> int:
    """Number of messages at a branch's beginning that an earlier path has, too: all up to its last response there."""
    first = branch.learn[0] if branch.learn else len(branch.messages)
    places = [place for place in range(first) if is_response(branch.messages[place])]
    return places[-1] + 1 if places else 0


def _counts(messages: list[Message]) -> TokenCounts:
    prompt = sum(len(message.token_ids) for message in messages if message.turn == PROMPT_TURN)
    generated = sum(len(message.token_ids) for message in messages if is_response(message))
    return TokenCounts(prompt, generated, sum(len(message.token_ids) for message in messages) - prompt - generated)
