"""Trajectories of agents, which call the policy by themselves: the calls of a closed session become turns."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from kuberoll_workers.data.messages import LOGPROB_TYPE, Message, message_of, token_array
from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.data.record import Branch, Timing
from kuberoll_workers.data.sampling import Distribution, listed
from kuberoll_workers.data.stop_reasons import StopReason
from kuberoll_workers.data.tool_calls import call_id
from kuberoll_workers.environments.outcome import StepOutcome
from kuberoll_workers.policy.agent_sessions import (
    ClosedSession,
    SessionMessage,
    SessionPath,
)
from kuberoll_workers.policy.interface import GenerationResult
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from kuberoll_workers.rollouts.settings import RolloutSettings
from kuberoll_workers.rollouts.trajectory import Trajectory

_SPARE_SECONDS: Final = 600.0
# The window and the turns are the session's business: what was sampled is kept whole.
_UNBOUNDED: Final = 1 << 62


class NothingSampled(TrajectoryFailed):
    """The agent made no call that was answered: there is nothing to learn from."""

    def __init__(self) -> None:
        super().__init__(
            "the agent ended without an answered call of the policy: there is no trajectory",
            reason="EnvironmentInvalid",
            stage="environment",
        )


def agent_trajectory(
    sample: Sample,
    settings: RolloutSettings,
    closed: ClosedSession,
    outcome: StepOutcome | None,
    decode: Callable[[Sequence[int]], str],
    *,
    seconds: float = 0.0,
) -> Trajectory:
    """The trajectory of a session: its first path, with the others as branches.

    The reward is that of the last turn. The time outside of calls is the environment's: that before a call in its turn,
    and that after the last one in the last turn.

    Args:
        outcome: What the agent returned; None: it failed, and its last turn is incomplete.
        decode: Text of ids, without special tokens.
        seconds: Duration of the agent's episode.

    Raises:
        NothingSampled: There is no call in it.
    """
    # An empty response is no turn, and a path of nothing else no path.
    paths = [path for path in closed.trajectories if any(_turns(path))]
    if not paths:
        raise NothingSampled
    first, *others = paths
    turns = list(_turns(first))
    prompt = turns[0].read
    trajectory = Trajectory(
        dataclasses.replace(
            sample,
            partial=None,
            prompt=dataclasses.replace(
                sample.prompt,
                messages=tuple(_messages(prompt, "user", turn=0)),
                token_ids=token_array() if prompt is None else token_array(prompt.token_ids),
                episode_messages=0,
                metadata=sample.prompt.metadata,
                # Those that the agent declared, which may be others than the row's.
                tools=first.tools,
            ),
        ),
        dataclasses.replace(settings, max_sequence_length=_UNBOUNDED, max_turns=_UNBOUNDED),
    )
    parts = {} if outcome is None else dict.fromkeys(outcome.reward_parts, 0.0)
    began = closed.opened_at
    for number, (turn, follows) in enumerate(zip(turns, [*turns[1:], None], strict=True)):
        generation, ended = first.timing.generation_seconds[number], first.timing.ended_at[number]
        response = turn.response
        trajectory.add_response(
            GenerationResult(
                token_ids=token_array(response.token_ids),
                logprobs=array(LOGPROB_TYPE, response.logprobs or ()),
                finish_reason="length" if response.finish_reason == "length" else "stop",
                policy_versions=tuple(response.policy_versions),
            ),
            decode(response.token_ids),
            generation,
            fields=_fields(response, number + 1),
        )
        waited = max(0.0, ended - generation - began)
        if follows is not None:
            read = follows.read
            step = dataclasses.replace(_BETWEEN, reward_parts=parts)
            if read is not None:
                *_, last = chats = _chats(read, "environment")
                step = dataclasses.replace(step, role=last["role"], content=last["content"], messages=tuple(chats))
            ids = token_array() if read is None else token_array(read.token_ids)
            trajectory.add_step(step, ids, waited, ended_at=round(ended, 3))
        elif outcome is not None:
            after = max(0.0, closed.opened_at + seconds - ended)
            end = dataclasses.replace(outcome, terminated=True)
            trajectory.add_step(end, token_array(), waited + after, ended_at=round(ended + after, 3))
            trajectory.stop_reason = _stop_reason(closed)
        began = ended
    trajectory.branches = [_branch(path, decode, settings.usual) for path in others] or None
    trajectory.distributions = [turn.response.sampling for turn in turns]
    trajectory.continuity = dict(closed.continuity)
    return trajectory


# What lies between two calls of an agent: neither an end nor a reward.
_BETWEEN: Final = StepOutcome(
    role="environment", content="", metadata=None, stop_strings=None, reward=0.0, terminated=False
)


class _Turn(NamedTuple):
    read: SessionMessage | None
    response: SessionMessage


def _turns(path: SessionPath) -> Iterator[_Turn]:
    read: SessionMessage | None = None
    for message in path.messages:
        if message.role == "assistant":
            yield _Turn(read, message)
            read = None
        else:
            read = message


def _stop_reason(closed: ClosedSession) -> StopReason:
    """Why the trajectory ended: its newest response of all paths decides."""
    newest = max(closed.trajectories, key=lambda path: max(path.timing.ended_at, default=0.0))
    if [turn.response.finish_reason for turn in _turns(newest)][-1:] == ["length"]:
        return "truncated"
    return "max_turns" if closed.refused else "terminated"


def _chats(message: SessionMessage, role: str) -> list[dict[str, Any]]:
    """Chat messages of what was read; where they are unknown, its text as one message."""
    return list(message.chat or ()) or [{"role": role, "content": message.content}]


def _messages(message: SessionMessage | None, role: str, *, turn: int) -> Iterator[Message]:
    """What was read, as messages of which the last one has the ids: a template may write tokens between them."""
    if message is None:
        return
    *others, last = _chats(message, role)
    for chat in others:
        yield message_of(chat, token_array(), turn=turn)
    yield message_of(last, token_array(message.token_ids), turn=turn)


def _fields(response: SessionMessage, turn: int) -> dict[str, Any]:
    """Further fields of a response that calls tools, as those of the loop's own responses."""
    calls = [
        # The agent did not go on from those without an id.
        {"id": call.get("id") or call_id(turn, count), **call}
        for count, call in enumerate(response.tool_calls or (), start=1)
    ]
    if not calls:
        return {}
    return {"tool_calls": calls} if response.text is None else {"tool_calls": calls, "text": response.text}


def _branch(path: SessionPath, decode: Callable[[Sequence[int]], str], usual: Distribution | None) -> Branch:
    messages: list[Message] = []
    learn = []
    for number, turn in enumerate(_turns(path), start=1):
        messages += _messages(turn.read, "user" if number == 1 else "environment", turn=number - 1)
        response = turn.response
        chat = {"role": "assistant", "content": decode(response.token_ids), **_fields(response, number)}
        message = message_of(chat, token_array(response.token_ids), turn=number)
        message.truncated = response.finish_reason == "length"
        message.logprobs = array(LOGPROB_TYPE, response.logprobs or ())
        message.policy_versions = tuple(response.policy_versions)
        message.sampled = True
        if response.learn:
            learn.append(len(messages))
        messages.append(message)
    timing = path.timing
    return Branch(
        sampling=listed([turn.response.sampling for turn in _turns(path)], usual),
        messages=messages,
        learn=learn,
        timing=Timing(
            generation_seconds=list(timing.generation_seconds),
            environment_seconds=[0.0] * len(timing.generation_seconds),
            ended_at=[round(ended, 3) for ended in timing.ended_at],
        ),
    )
