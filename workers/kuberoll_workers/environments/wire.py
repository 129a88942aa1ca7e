"""Messages between a worker and an environment's process: plain data in MessagePack; `channel` carries them.

There is no pickle: neither side executes anything that the other one sends. Metadata is sent as JSON text, so received
metadata is plain data or rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
import orjson

from kuberoll_workers.data.plain import NotPlain, parse
from kuberoll_workers.data.tracebacks import Traceback
from kuberoll_workers.environments.batches import AnyBatch, CloseBatch, GroupBatch, ResetBatch, StepBatch, StepItem
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.interface import (
    EndReason,
    Episode,
    EpisodeEnd,
    EpisodeStart,
    GroupMember,
    GroupScore,
    Metadata,
)
from kuberoll_workers.environments.outcome import (
    EnvironmentFault,
    EpisodeLost,
    Outcomes,
    RowFault,
    StepInvalid,
    StepOutcome,
    StepRaised,
    check_outcome,
    check_start,
    split_scores,
)

MAX_MESSAGE = 256 << 20
"""Maximum size of a message in bytes; a process that announces a longer one is ended."""

FaultKind = Literal["raised", "invalid", "row", "lost"]

_FAULTS: dict[FaultKind, type[EnvironmentFault]] = {
    "raised": StepRaised,
    "invalid": StepInvalid,
    "row": RowFault,
    "lost": EpisodeLost,
}


class InvalidMessage(ValueError):
    """Received data that is not a valid message; the sender must not be used any more."""


class Start(msgspec.Struct, array_like=True):
    """First message to the process: the environment and its sandbox; `config` is JSON text."""

    name: str
    type: str | None
    entrypoint: str | None
    config: bytes
    scratch: str
    protected: list[str]
    readable: list[str]
    writable: list[str]


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """Answer to `Start`: the environment is there."""

    hooks: Hooks


class Step(msgspec.Struct, array_like=True, tag="step"):
    """One batched step; metadata as JSON texts; names of episodes if they must have been begun here."""

    logs: list[list[dict[str, Any]]]
    metadata: list[bytes | None]
    episodes: list[str | None]


class EpisodeItem(msgspec.Struct, array_like=True):
    """An `Episode`; metadata is JSON text."""

    id: str
    messages: list[dict[str, Any]]
    metadata: bytes | None
    seed: int
    max_turns: int
    tools: list[dict[str, Any]] | None = None


class Reset(msgspec.Struct, array_like=True, tag="reset"):
    """Beginnings of episodes."""

    episodes: list[EpisodeItem]


class EndItem(msgspec.Struct, array_like=True):
    """An `EpisodeEnd`; metadata is JSON text."""

    id: str
    metadata: bytes | None
    reason: EndReason


class Close(msgspec.Struct, array_like=True, tag="close"):
    """Ends of episodes."""

    ends: list[EndItem]


class MemberItem(msgspec.Struct, array_like=True):
    """A `GroupMember`; metadata is JSON text."""

    id: str
    messages: list[dict[str, Any]]
    metadata: bytes | None
    reward: float
    stop_reason: str
    answer: str | None
    group_reward: float | None


class ScoreGroup(msgspec.Struct, array_like=True, tag="score_group"):
    """A complete prompt group."""

    members: list[MemberItem]


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown"):
    """The last request."""


class Generate(msgspec.Struct, array_like=True, tag="generate"):
    """Request for dataset rows."""

    count: int
    seed: int


class MoreRows(msgspec.Struct, array_like=True, tag="more_rows"):
    """Request for the dataset rows after those of the last answer."""


class Rows(msgspec.Struct, array_like=True, tag="rows"):
    """Some dataset rows, as JSON texts; empty at the end."""

    rows: list[bytes]


class PostProcess(msgspec.Struct, array_like=True, tag="post_process"):
    """Request for the environment's own metrics of its finished trajectories; `columns` is JSON text."""

    columns: bytes


class Metrics(msgspec.Struct, array_like=True, tag="metrics"):
    """Metrics of an environment, as JSON text."""

    metrics: bytes


class Outcome(msgspec.Struct, array_like=True, tag="outcome"):
    """A `StepOutcome`; metadata is JSON text."""

    role: str
    content: str
    metadata: bytes | None
    stop_strings: list[str] | None
    reward: float
    terminated: bool
    reward_parts: dict[str, float]
    answer: str | None
    messages: list[dict[str, str]] = []


class Fault(msgspec.Struct, array_like=True, tag="fault"):
    """An `EnvironmentFault`."""

    kind: FaultKind
    text: str
    traceback: Traceback | None = None


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """Outcomes of a step, one per trajectory."""

    answered: bool
    outcomes: list[Outcome | Fault]


class StartItem(msgspec.Struct, array_like=True, tag="start"):
    """An `EpisodeStart`; metadata is JSON text."""

    messages: list[dict[str, str]]
    metadata: bytes | None
    stop_strings: list[str] | None
    tools: list[dict[str, Any]] | None = None


class Starts(msgspec.Struct, array_like=True, tag="starts"):
    """Starts of episodes, one per episode."""

    starts: list[StartItem | Fault]


class ScoreItem(msgspec.Struct, array_like=True):
    """A `GroupScore`; metadata is JSON text."""

    reward: float
    metadata: bytes | None


class Scores(msgspec.Struct, array_like=True, tag="scores"):
    """Scores of a prompt group, one per member."""

    scores: list[ScoreItem]


class Closed(msgspec.Struct, array_like=True, tag="closed"):
    """Answer to `Close` and `Shutdown`."""


Request = Step | Reset | Close | ScoreGroup | Shutdown | Generate | MoreRows | PostProcess
AnyAnswer = Ready | Answer | Starts | Closed | Scores | Rows | Metrics | Fault


_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(AnyAnswer)
_requests = msgspec.msgpack.Decoder(Request)
_starts = msgspec.msgpack.Decoder(Start)


def encode(message: Start | Request | AnyAnswer) -> bytes:
    """A message as bytes.

    Raises:
        UnicodeEncodeError, TypeError: It contains invalid Unicode, is not plain data, or too long.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        raise TypeError(f"a message of {len(data)} bytes is longer than {MAX_MESSAGE}")
    return data


def decode_start(data: bytes) -> Start:
    return _starts.decode(data)


def decode_request(data: bytes) -> Request:
    request: Request = _requests.decode(data)
    return request


def request_of(batch: AnyBatch) -> Step | Reset | Close | ScoreGroup:
    """A batch as a message.

    Raises:
        TypeError: Metadata is not plain data.
    """
    if isinstance(batch, StepBatch):
        return Step(
            [item.log for item in batch.items],
            [_json(item.metadata) for item in batch.items],
            [item.episode for item in batch.items],
        )
    if isinstance(batch, ResetBatch):
        return Reset(
            [
                EpisodeItem(
                    episode.id,
                    list(episode.messages),
                    _json(episode.metadata),
                    episode.seed,
                    episode.max_turns,
                    None if episode.tools is None else list(episode.tools),
                )
                for episode in batch.episodes
            ]
        )
    if isinstance(batch, GroupBatch):
        return ScoreGroup([_member_item(member) for member in batch.members])
    return Close([EndItem(end.id, _json(end.metadata), end.reason) for end in batch.ends])


def batch_of(request: Step | Reset | Close | ScoreGroup) -> AnyBatch:
    """The batch of a message."""
    if isinstance(request, Step):
        columns = zip(request.logs, request.metadata, request.episodes, strict=True)
        return StepBatch([StepItem(list(log), _value(state), episode) for log, state, episode in columns])
    if isinstance(request, Reset):
        return ResetBatch(
            [
                Episode(
                    id=item.id,
                    messages=list(item.messages),
                    metadata=_value(item.metadata),
                    seed=item.seed,
                    max_turns=item.max_turns,
                    tools=item.tools,
                )
                for item in request.episodes
            ]
        )
    if isinstance(request, ScoreGroup):
        return GroupBatch([_member(item) for item in request.members])
    return CloseBatch([EpisodeEnd(id=end.id, metadata=_value(end.metadata), reason=end.reason) for end in request.ends])


def answer_of(batch: AnyBatch, results: Sequence[Any]) -> Answer | Starts | Closed | Scores | Fault:
    """The results of a batch as a message."""
    if isinstance(batch, StepBatch):
        outcomes = [fault_message(item) if isinstance(item, EnvironmentFault) else _outcome(item) for item in results]
        return Answer(getattr(results, "answered", False), outcomes)
    if isinstance(batch, ResetBatch):
        return Starts([fault_message(item) if isinstance(item, EnvironmentFault) else _start(item) for item in results])
    if isinstance(batch, GroupBatch):
        (scores,) = results
        return Scores([ScoreItem(score.reward, _json(score.metadata)) for score in scores])
    return Closed()


def fault_message(fault: EnvironmentFault) -> Fault:
    """A fault as a message."""
    kind: FaultKind = next((kind for kind, known in _FAULTS.items() if isinstance(fault, known)), "raised")
    return Fault(kind, str(fault), fault.traceback)


def decode_ready(data: bytes) -> Hooks:
    """Hooks of an environment that is ready.

    Raises:
        InvalidMessage: It is not a valid answer to `Start`.
        EnvironmentFault: The environment could not be created.
    """
    return _answer(data, Ready).hooks


def decode_closed(data: bytes) -> None:
    """Check the answer to `Shutdown`.

    Raises:
        InvalidMessage: It is not a valid one.
        EnvironmentFault: It failed.
    """
    _answer(data, Closed)


def decode_results(data: bytes, batch: AnyBatch) -> Sequence[Any]:
    """Results of a batch, validated again: the process is not trusted.

    Raises:
        InvalidMessage: It is not a valid answer to the batch.
        EnvironmentFault: The whole call failed.
    """
    if isinstance(batch, StepBatch):
        answer = _answer(data, Answer)
        check_count(len(answer.outcomes), len(batch))
        return Outcomes([received(item) for item in answer.outcomes], answered=answer.answered)
    if isinstance(batch, ResetBatch):
        starts = _answer(data, Starts).starts
        check_count(len(starts), len(batch))
        return [received_start(item) for item in starts]
    if isinstance(batch, GroupBatch):
        scores = _answer(data, Scores).scores
        check_count(len(scores), len(batch.members))
        return [received_scores(scores)]
    _answer(data, Closed)
    return [None] * len(batch)


_Answer = TypeVar("_Answer", Ready, Answer, Starts, Closed, Scores, Rows, Metrics)


def _answer(data: bytes, kind: type[_Answer]) -> _Answer:
    try:
        answer = _answers.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"its answer is invalid: {error}") from error
    if isinstance(answer, Fault):
        raise fault_of_message(answer)
    if not isinstance(answer, kind):
        raise InvalidMessage("its answer is one to another request")
    return answer


def check_count(count: int, expected: int) -> None:
    if count != expected:
        raise InvalidMessage(f"its answer has {count} outcomes for {expected} trajectories")


def decode_rows(data: bytes) -> list[Any]:
    """Some rows; empty at the end.

    Raises:
        InvalidMessage: They are not valid rows.
        EnvironmentFault: The generation of rows failed.
    """
    try:
        return [parse(row, "a row") for row in _answer(data, Rows).rows]
    except NotPlain as error:
        raise InvalidMessage(f"its answer is invalid: {error}") from error


def decode_metrics(data: bytes) -> bytes:
    """Metrics, as JSON text.

    Raises:
        InvalidMessage: They are not valid.
        EnvironmentFault: They could not be computed.
    """
    text = _answer(data, Metrics).metrics
    try:
        if not isinstance(orjson.loads(text), dict):
            raise InvalidMessage("its metrics are not an object")
    except ValueError as error:
        raise InvalidMessage(f"its metrics are not JSON: {error}") from error
    return text


def received_start(item: StartItem | Fault) -> EpisodeStart | EnvironmentFault:
    if isinstance(item, Fault):
        return fault_of_message(item)
    try:
        state = _state(item.metadata)
        return check_start(
            EpisodeStart(messages=item.messages, metadata=state, stop_strings=item.stop_strings, tools=item.tools)
        )
    except ValueError as error:
        return StepInvalid(str(error))
    except StepInvalid as fault:
        return fault


def received_scores(items: list[ScoreItem]) -> list[GroupScore] | EnvironmentFault:
    try:
        return split_scores(
            [GroupScore(reward=item.reward, metadata=_state(item.metadata)) for item in items], len(items)
        )
    except ValueError as error:
        return StepInvalid(str(error))
    except StepInvalid as fault:
        return fault


def _member_item(member: GroupMember) -> MemberItem:
    return MemberItem(
        member.id,
        list(member.messages),
        _json(member.metadata),
        member.reward,
        member.stop_reason,
        member.answer,
        member.group_reward,
    )


def _member(item: MemberItem) -> GroupMember:
    return GroupMember(
        id=item.id,
        messages=list(item.messages),
        metadata=_value(item.metadata),
        reward=item.reward,
        stop_reason=item.stop_reason,
        answer=item.answer,
        group_reward=item.group_reward,
    )


def _state(text: bytes | None) -> Metadata:
    state: Any = None if text is None else parse(text, "metadata")
    if state is not None and not isinstance(state, dict):
        raise StepInvalid("metadata is not an object")
    return state


def _json(metadata: Metadata) -> bytes | None:
    return None if metadata is None else orjson.dumps(metadata)


def _value(text: bytes | None) -> Metadata:
    return None if text is None else orjson.loads(text)


def _start(start: EpisodeStart) -> StartItem:
    stops = None if start.stop_strings is None else list(start.stop_strings)
    tools = None if start.tools is None else list(start.tools)
    return StartItem([dict(message) for message in start.messages], _json(start.metadata), stops, tools)


def received(item: Outcome | Fault) -> StepOutcome | EnvironmentFault:
    if isinstance(item, Fault):
        return fault_of_message(item)
    try:
        outcome = StepOutcome(
            role=item.role,
            content=item.content,
            metadata=_state(item.metadata),
            stop_strings=tuple(item.stop_strings) if item.stop_strings else None,
            reward=item.reward,
            terminated=item.terminated,
            reward_parts=item.reward_parts,
            answer=item.answer,
            messages=tuple(item.messages),
        )
        check_outcome(outcome)
    except ValueError as error:
        return StepInvalid(str(error))
    except StepInvalid as fault:
        return fault
    return outcome


def _outcome(outcome: StepOutcome) -> Outcome:
    return Outcome(
        outcome.role,
        outcome.content,
        _json(outcome.metadata),
        None if outcome.stop_strings is None else list(outcome.stop_strings),
        outcome.reward,
        outcome.terminated,
        dict(outcome.reward_parts),
        outcome.answer,
        [dict(message) for message in outcome.messages],
    )


def fault_of_message(message: Fault) -> EnvironmentFault:
    traceback = message.traceback
    return _FAULTS[message.kind](message.text, None if traceback is None else traceback.bounded())
