"""Paths of a trajectory: its own, and those that an agent's calls made beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from kuberoll_workers.data.messages import PROMPT_TURN, Message
from kuberoll_workers.data.record import Branch, TokenCounts, TrajectoryRecord

OWN_PATH: Final = 0
"""Number of a trajectory's own path."""


def paths(record: TrajectoryRecord) -> Iterator[tuple[int, TrajectoryRecord]]:
    """All paths of a trajectory by number, as trajectories without branches; each response is learned in one of them.

    All of a branch before its first response that no earlier path has is its prompt, of which nothing counts as
    sampled: the responses in it are learned in an earlier path. It has the trajectory's reward, in
    its last turn. A branch without such a response is left out.
    """
    yield OWN_PATH, record if record.branches is None else replace(record, branches=None)
    for number, branch in enumerate(record.branches or (), start=OWN_PATH + 1):
        if branch.learn:
            yield number, _branch_path(record, branch)


def _branch_path(own: TrajectoryRecord, branch: Branch) -> TrajectoryRecord:
    first = branch.learn[0]
    shared = branch.messages[first].turn - 1
    messages = [
        replace(message, turn=PROMPT_TURN, sampled=False, logprobs=None, policy_versions=None)
        if place < first
        else replace(message, turn=message.turn - shared)
        for place, message in enumerate(branch.messages)
    ]
    count = len(branch.learn)
    zeros = [0.0] * (count - 1)
    return replace(
        own,
        branches=None,
        messages=messages,
        rewards=[*zeros, *own.rewards[-1:]],
        reward_parts={name: [*zeros, *parts[-1:]] for name, parts in own.reward_parts.items()},
        stop_reason="truncated" if messages[branch.learn[-1]].truncated else own.stop_reason,
        turn_count=count,
        sampling=None if branch.sampling is None else branch.sampling[shared:],
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
    places = [place for place in range(first) if branch.messages[place].sampled]
    return places[-1] + 1 if places else 0


def until_last_response(messages: list[Message]) -> list[Message]:
    """Messages up to the last response, or all if there is none; later observations teach nothing."""
    last = max((number for number, message in enumerate(messages) if message.sampled), default=None)
    return messages if last is None else messages[: last + 1]


def _counts(messages: list[Message]) -> TokenCounts:
    prompt = sum(len(message.token_ids) for message in messages if message.turn == PROMPT_TURN)
    generated = sum(len(message.token_ids) for message in messages if message.sampled)
    return TokenCounts(prompt, generated, sum(len(message.token_ids) for message in messages) - prompt - generated)
