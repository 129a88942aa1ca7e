"""Messages of the HTTP protocol between workers and environment servers: docs/reference/environment-protocol.md.

They say the same as the messages to an environment's process (`wire`), with names for all fields, so that a server can
be written in any language. Neither side executes anything that the other one sends, and both check what they receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec
import orjson

from kuberoll_workers.data.plain import NotPlain, parse
from kuberoll_workers.data.tracebacks import Traceback
from kuberoll_workers.environments import wire
from kuberoll_workers.environments.batches import AnyBatch, CloseBatch, GroupBatch, ResetBatch, StepBatch, StepItem
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.interface import (
    EndReason,
    Episode,
    EpisodeEnd,
    EpisodeStart,
    GroupMember,
    Metadata,
    Recovery,
)
from kuberoll_workers.environments.outcome import EnvironmentFault, Outcomes, StepOutcome, StepTimedOut

VERSION: Final = 2
PREFIX: Final = "/v1"
HEALTH: Final = "/healthz"

MAX_BODY: Final = wire.MAX_MESSAGE
"""Maximum size of a body in bytes."""

TIMEOUT_HEADER: Final = "Kuberoll-Timeout"
"""Header of a request: seconds that the environment is given, once the call has begun."""

CALL_HEADER: Final = "Kuberoll-Call"
"""Header of a call, and of its answer: an id that the answer repeats."""

STATUS_FAULT: Final = 422
"""Status of an answer whose body is a `Fault`: the environment failed, and the server is well."""
STATUS_BUSY: Final = 503
"""Status of a call that was not begun and may be sent again, to this server or to another."""

NULL: Final = msgspec.Raw(b"null")
"""Metadata that is not there; the same object, so that it is left out."""

FaultKind = Literal["raised", "invalid", "row", "lost", "timeout"]


class RequestRefused(ValueError):
    """A request that is not one of the protocol."""


class Fault(msgspec.Struct, omit_defaults=True):
    """Failure of an environment."""

    kind: FaultKind
    text: str
    traceback: Traceback | None = None


class Info(msgspec.Struct):
    """Answer of `GET /v1/info`.

    Attributes:
        name: Name of the environment, for messages.
        reset, close, shutdown, recovery, score_group, declares_tools: See `Hooks`.
        parallel: Number of calls that are worth sending at a time.
        digest: Digest of the environment's code; None: unknown.
    """

    protocol: int
    name: str = ""
    reset: bool = False
    close: bool = False
    shutdown: bool = False
    recovery: Recovery = "metadata"
    score_group: bool = False
    declares_tools: bool = False
    parallel: int = 1
    digest: str | None = None

    @property
    def hooks(self) -> Hooks:
        return Hooks(
            reset=self.reset,
            close=self.close,
            shutdown=self.shutdown,
            recovery=self.recovery,
            score_group=self.score_group,
            declares_tools=self.declares_tools,
        )


class Step(msgspec.Struct, omit_defaults=True):
    """One trajectory's step."""

    log: list[dict[str, Any]]
    metadata: msgspec.Raw = NULL
    episode: str | None = None


class StepRequest(msgspec.Struct):
    """Body of `POST /v1/step`."""

    steps: list[Step]


class Outcome(msgspec.Struct, omit_defaults=True):
    """A `StepOutcome`, or the fault of this trajectory alone."""

    role: str = "environment"
    content: str = ""
    metadata: msgspec.Raw = NULL
    stop_strings: list[str] | None = None
    reward: float = 0.0
    reward_parts: dict[str, float] = {}
    terminated: bool = False
    answer: str | None = None
    messages: list[dict[str, str]] = []
    fault: Fault | None = None


class StepAnswer(msgspec.Struct, omit_defaults=True):
    """Answer of `POST /v1/step`: one outcome for each step, in their order.

    Attributes:
        answered: The environment returns answers, even if they are null here.
    """

    outcomes: list[Outcome]
    answered: bool = False


class EpisodeItem(msgspec.Struct):
    """An `Episode`."""

    id: str
    messages: list[dict[str, Any]]
    seed: int
    max_turns: int
    metadata: msgspec.Raw = NULL
    tools: list[dict[str, Any]] | None = None


class ResetRequest(msgspec.Struct):
    """Body of `POST /v1/reset`."""

    episodes: list[EpisodeItem]


class Start(msgspec.Struct, omit_defaults=True):
    """An `EpisodeStart`, or the fault of this episode alone."""

    messages: list[dict[str, str]] = []
    metadata: msgspec.Raw = NULL
    stop_strings: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    fault: Fault | None = None


class ResetAnswer(msgspec.Struct):
    """Answer of `POST /v1/reset`: one start for each episode, in their order."""

    starts: list[Start]


class End(msgspec.Struct):
    """An `EpisodeEnd`."""

    id: str
    reason: EndReason
    metadata: msgspec.Raw = NULL


class CloseRequest(msgspec.Struct):
    """Body of `POST /v1/close`."""

    ends: list[End]


class Member(msgspec.Struct, omit_defaults=True):
    """A `GroupMember`."""

    id: str
    messages: list[dict[str, Any]]
    reward: float
    stop_reason: str
    metadata: msgspec.Raw = NULL
    answer: str | None = None
    group_reward: float | None = None


class GroupRequest(msgspec.Struct):
    """Body of `POST /v1/score_group`: a complete prompt group."""

    members: list[Member]


class Score(msgspec.Struct, omit_defaults=True):
    """A `GroupScore`."""

    reward: float
    metadata: msgspec.Raw = NULL


class GroupAnswer(msgspec.Struct):
    """Answer of `POST /v1/score_group`: one score for each member, in their order."""

    scores: list[Score]


class PostProcessRequest(msgspec.Struct):
    """Body of `POST /v1/post_process`: the columns of the environment's finished trajectories."""

    columns: msgspec.Raw


class PostProcessAnswer(msgspec.Struct):
    """Answer of `POST /v1/post_process`: the environment's own metrics."""

    metrics: msgspec.Raw


class RowsRequest(msgspec.Struct):
    """Body of `POST /v1/generate_dataset`."""

    count: int
    seed: int


class RowsAnswer(msgspec.Struct):
    """Answer of `POST /v1/generate_dataset`."""

    rows: list[msgspec.Raw]


_Body = TypeVar("_Body")

_encoder = msgspec.json.Encoder()
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    """A message as JSON.

    Raises:
        UnicodeEncodeError, TypeError: It contains invalid Unicode, or is not plain data.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_BODY:
        raise TypeError(f"a message of {len(data)} bytes is longer than {MAX_BODY}")
    return data


def decode_request(data: bytes, kind: type[_Body]) -> _Body:
    """A request's body.

    Raises:
        RequestRefused: It is none of this kind.
    """
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestRefused(f"the body is not a {kind.__name__}: {error}") from error


def decode_answer(data: bytes, kind: type[_Body]) -> _Body:
    """An answer's body.

    Raises:
        wire.InvalidMessage: It is none of this kind.
    """
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wire.InvalidMessage(f"its answer is invalid: {error}") from error


def decode_fault(data: bytes) -> EnvironmentFault:
    """The fault in an answer with `STATUS_FAULT`.

    Raises:
        wire.InvalidMessage: There is none.
    """
    return _fault(decode_answer(data, Fault))


def _decoder(kind: type[_Body]) -> msgspec.json.Decoder[_Body]:
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(kind)
    return _decoders[kind]


def body_of(batch: AnyBatch) -> bytes:
    """A batch as the body of its request.

    Raises:
        UnicodeEncodeError, TypeError: It is not plain data.
    """
    if isinstance(batch, StepBatch):
        return encode(StepRequest([Step(item.log, _raw(item.metadata), item.episode) for item in batch.items]))
    if isinstance(batch, ResetBatch):
        return encode(
            ResetRequest(
                [
                    EpisodeItem(
                        id=episode.id,
                        messages=list(episode.messages),
                        metadata=_raw(episode.metadata),
                        seed=episode.seed,
                        max_turns=episode.max_turns,
                        tools=None if episode.tools is None else list(episode.tools),
                    )
                    for episode in batch.episodes
                ]
            )
        )
    if isinstance(batch, GroupBatch):
        return encode(GroupRequest([_member_item(member) for member in batch.members]))
    return encode(CloseRequest([End(end.id, end.reason, _raw(end.metadata)) for end in batch.ends]))


def batch_of(data: bytes, method: str) -> AnyBatch:
    """The batch in the body of a request.

    Raises:
        RequestRefused: It is no request of this method.
    """
    if method == StepBatch.method:
        steps = decode_request(data, StepRequest).steps
        return StepBatch([StepItem(list(item.log), _value(item.metadata), item.episode) for item in steps])
    if method == ResetBatch.method:
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
                for item in decode_request(data, ResetRequest).episodes
            ]
        )
    if method == GroupBatch.method:
        return GroupBatch([_member(item) for item in decode_request(data, GroupRequest).members])
    ends = decode_request(data, CloseRequest).ends
    return CloseBatch([EpisodeEnd(id=end.id, metadata=_value(end.metadata), reason=end.reason) for end in ends])


def answer_of(batch: AnyBatch, results: Sequence[Any]) -> bytes:
    """The results of a batch as the body of its answer."""
    if isinstance(batch, StepBatch):
        outcomes = [
            Outcome(fault=fault_message(item)) if isinstance(item, EnvironmentFault) else _outcome(item)
            for item in results
        ]
        return encode(StepAnswer(outcomes, getattr(results, "answered", False)))
    if isinstance(batch, ResetBatch):
        return encode(
            ResetAnswer(
                [
                    Start(fault=fault_message(item)) if isinstance(item, EnvironmentFault) else _start(item)
                    for item in results
                ]
            )
        )
    if isinstance(batch, GroupBatch):
        (scores,) = results
        return encode(GroupAnswer([Score(score.reward, _raw(score.metadata)) for score in scores]))
    return b"{}"


def decode_results(data: bytes, batch: AnyBatch) -> Sequence[Any]:
    """Results of a batch, validated again: the server is not trusted.

    Raises:
        wire.InvalidMessage: It is not a valid answer to the batch.
    """
    if isinstance(batch, StepBatch):
        answer = decode_answer(data, StepAnswer)
        wire.check_count(len(answer.outcomes), len(batch))
        return Outcomes([_received(item) for item in answer.outcomes], answered=answer.answered)
    if isinstance(batch, ResetBatch):
        starts = decode_answer(data, ResetAnswer).starts
        wire.check_count(len(starts), len(batch))
        return [_received_start(item) for item in starts]
    if isinstance(batch, GroupBatch):
        scores = decode_answer(data, GroupAnswer).scores
        wire.check_count(len(scores), len(batch.members))
        return [wire.received_scores([wire.ScoreItem(item.reward, _text(item.metadata)) for item in scores])]
    return [None] * len(batch)


def fault_message(fault: EnvironmentFault) -> Fault:
    """A fault as a message."""
    if isinstance(fault, StepTimedOut):
        return Fault("timeout", str(fault), fault.traceback)
    message = wire.fault_message(fault)
    return Fault(message.kind, message.text, message.traceback)


def _fault(message: Fault) -> EnvironmentFault:
    if message.kind == "timeout":
        return StepTimedOut(message.text, None if message.traceback is None else message.traceback.bounded())
    return wire.fault_of_message(wire.Fault(message.kind, message.text, message.traceback))


def _received(item: Outcome) -> StepOutcome | EnvironmentFault:
    if item.fault is not None:
        return _fault(item.fault)
    return wire.received(
        wire.Outcome(
            item.role,
            item.content,
            _text(item.metadata),
            item.stop_strings,
            item.reward,
            item.terminated,
            item.reward_parts,
            item.answer,
            item.messages,
        )
    )


def _received_start(item: Start) -> EpisodeStart | EnvironmentFault:
    if item.fault is not None:
        return _fault(item.fault)
    return wire.received_start(wire.StartItem(item.messages, _text(item.metadata), item.stop_strings, item.tools))


def _outcome(outcome: StepOutcome) -> Outcome:
    return Outcome(
        role=outcome.role,
        content=outcome.content,
        metadata=_raw(outcome.metadata),
        stop_strings=None if outcome.stop_strings is None else list(outcome.stop_strings),
        reward=outcome.reward,
        reward_parts=dict(outcome.reward_parts),
        terminated=outcome.terminated,
        answer=outcome.answer,
        messages=[dict(message) for message in outcome.messages],
    )


def _start(start: EpisodeStart) -> Start:
    return Start(
        messages=[dict(message) for message in start.messages],
        metadata=_raw(start.metadata),
        stop_strings=None if start.stop_strings is None else list(start.stop_strings),
        tools=None if start.tools is None else list(start.tools),
    )


def _member_item(member: GroupMember) -> Member:
    return Member(
        id=member.id,
        messages=list(member.messages),
        reward=member.reward,
        stop_reason=member.stop_reason,
        metadata=_raw(member.metadata),
        answer=member.answer,
        group_reward=member.group_reward,
    )


def _member(item: Member) -> GroupMember:
    return GroupMember(
        id=item.id,
        messages=list(item.messages),
        metadata=_value(item.metadata),
        reward=item.reward,
        stop_reason=item.stop_reason,
        answer=item.answer,
        group_reward=item.group_reward,
    )


def raw(text: bytes) -> msgspec.Raw:
    """JSON text as a part of a message."""
    return msgspec.Raw(text)


def _raw(metadata: Metadata) -> msgspec.Raw:
    return NULL if metadata is None else msgspec.Raw(orjson.dumps(metadata))


def _text(raw: msgspec.Raw) -> bytes | None:
    text = bytes(raw)
    return None if text == b"null" else text


def _value(raw: msgspec.Raw) -> Metadata:
    text = _text(raw)
    try:
        found = None if text is None else parse(text, "metadata")
    except NotPlain as error:
        raise RequestRefused(str(error)) from error
    if found is not None and not isinstance(found, dict):
        raise RequestRefused("metadata is not an object")
    return found
