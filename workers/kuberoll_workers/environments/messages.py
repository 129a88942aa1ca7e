"""Messages to an environment that runs elsewhere: JSON, over a channel to a process or over HTTP to a server.

`channel` carries them to a process of this machine; `remote` to a server, with docs/reference/environment-protocol.md,
so that one can be written in any language. Neither side executes anything that the other one sends, and both check what
they receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec
import orjson

from kuberoll_workers.data.causes import NO_EVIDENCE, REASONS, Cause, Evidence
from kuberoll_workers.data.plain import NotPlain, parse
from kuberoll_workers.data.tracebacks import Traceback
from kuberoll_workers.environments.batches import (
    AnyBatch,
    CloseBatch,
    GroupBatch,
    ResetBatch,
    StepBatch,
    StepItem,
    TrialsBatch,
)
from kuberoll_workers.environments.hooks import Hooks
from kuberoll_workers.environments.interface import (
    EndReason,
    Episode,
    EpisodeEnd,
    EpisodeStart,
    GroupMember,
    GroupScore,
    Metadata,
    Trials,
)
from kuberoll_workers.environments.outcome import (
    EnvironmentFault,
    EpisodeLost,
    Outcomes,
    RowFault,
    StepInvalid,
    StepOutcome,
    StepRaised,
    StepTimedOut,
    check_outcome,
    check_start,
    split_scores,
)
from kuberoll_workers.environments.trials import check_trials

MAX_BYTES: Final = 256 << 20
"""Maximum size of a message; whoever announces a longer one is not used any more."""

CREATE: Final = "create"
GENERATE_DATASET: Final = "generate_dataset"
MORE_ROWS: Final = "more_rows"
POST_PROCESS: Final = "post_process"
SHUTDOWN: Final = "shutdown"
"""Methods beside those of batches; `CREATE` and `MORE_ROWS` are those of a channel."""

EMPTY: Final = b"{}"
"""A request that needs no arguments, and an answer that says no more than that it is one."""

NULL: Final = msgspec.Raw(b"null")
"""Metadata that is not there; the same object, so that it is left out."""

FaultKind = Literal["raised", "invalid", "row", "lost", "timeout"]

_FAULTS: Final[dict[FaultKind, type[EnvironmentFault]]] = {
    "timeout": StepTimedOut,
    "raised": StepRaised,
    "invalid": StepInvalid,
    "row": RowFault,
    "lost": EpisodeLost,
}


# Anybody can nest lists deeper than Python's stack.
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class InvalidMessage(ValueError):
    """What was received is no answer; the sender must not be used any more."""


class RequestRefused(ValueError):
    """A request that is not one of the protocol."""


class CreateRequest(msgspec.Struct):
    """The first request over a channel: the environment of the process, and its access."""

    name: str
    type: str | None
    entrypoint: str | None
    config: msgspec.Raw
    scratch: str
    protected: Sequence[str]
    readable: Sequence[str]
    writable: Sequence[str]


class CreateAnswer(msgspec.Struct):
    """Answer of `create`: the environment is there."""

    hooks: Hooks


class Fault(msgspec.Struct, omit_defaults=True):
    """Failure of an environment.

    Attributes:
        reason: Why (`data.causes`); None, or one that is not known here: what its kind says.
    """

    kind: FaultKind
    text: str
    traceback: Traceback | None = None
    reason: str | None = None
    evidence: Evidence | None = None


class Step(msgspec.Struct, omit_defaults=True):
    """One trajectory's step."""

    log: list[dict[str, Any]]
    metadata: msgspec.Raw = NULL
    episode: str | None = None


class StepRequest(msgspec.Struct):
    """Request of `step`."""

    steps: list[Step]


class Outcome(msgspec.Struct, omit_defaults=True):
    """A `StepOutcome`, or the fault of this trajectory alone."""

    # `environment` where it is left out. It is written with every outcome, and with no fault.
    role: str | msgspec.UnsetType = msgspec.UNSET
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
    """Answer of `step`: one outcome for each step, in their order.

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
    """Request of `reset`."""

    episodes: list[EpisodeItem]


class Start(msgspec.Struct, omit_defaults=True):
    """An `EpisodeStart`, or the fault of this episode alone."""

    messages: list[dict[str, str]] = []
    metadata: msgspec.Raw = NULL
    stop_strings: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    fault: Fault | None = None


class ResetAnswer(msgspec.Struct):
    """Answer of `reset`: one start for each episode, in their order."""

    starts: list[Start]


class End(msgspec.Struct):
    """An `EpisodeEnd`."""

    id: str
    reason: EndReason
    metadata: msgspec.Raw = NULL


class CloseRequest(msgspec.Struct):
    """Request of `close`."""

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
    """Request of `score_group`: a complete prompt group."""

    members: list[Member]


class Score(msgspec.Struct, omit_defaults=True):
    """A `GroupScore`."""

    reward: float
    metadata: msgspec.Raw = NULL


class GroupAnswer(msgspec.Struct):
    """Answer of `score_group`: one score for each member, in their order."""

    scores: list[Score]


class TrialsItem(msgspec.Struct, omit_defaults=True):
    """The `Trials` of an episode, or the fault of this episode alone."""

    solutions: dict[str, list[dict[str, Any]]] = {}
    attacks: dict[str, list[dict[str, Any]]] = {}
    full_reward: float | None = None
    fault: Fault | None = None


class TrialsAnswer(msgspec.Struct):
    """Answer of `trials`, whose request is one of `reset`: one item for each episode, in their order."""

    trials: list[TrialsItem]


class PostProcessRequest(msgspec.Struct):
    """Request of `post_process`: the columns of the environment's finished trajectories."""

    columns: msgspec.Raw


class PostProcessAnswer(msgspec.Struct):
    """Answer of `post_process`: the environment's own metrics."""

    metrics: msgspec.Raw


class RowsRequest(msgspec.Struct):
    """Request of `generate_dataset`."""

    count: int
    seed: int


class RowsAnswer(msgspec.Struct):
    """Answer of `generate_dataset`."""

    rows: list[msgspec.Raw]


_Message = TypeVar("_Message")

_encoder = msgspec.json.Encoder()
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message as JSON.

    Raises:
        UnicodeEncodeError, TypeError: It contains invalid Unicode, is not plain data, or too long.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_BYTES:
        raise TypeError(f"a message of {len(data)} bytes is longer than {MAX_BYTES}")
    return data


def decode_request(data: bytes, kind: type[_Message]) -> _Message:
    """Read a request.

    Raises:
        RequestRefused: It is none of this kind.
    """
    try:
        return _decoder(kind).decode(data)
    except _UNREADABLE as error:
        raise RequestRefused(f"the body is not a {kind.__name__}: {error}") from error


def decode_answer(data: bytes, kind: type[_Message]) -> _Message:
    """Read an answer.

    Raises:
        InvalidMessage: It is none of this kind.
    """
    try:
        return _decoder(kind).decode(data)
    except _UNREADABLE as error:
        raise InvalidMessage(f"its answer is invalid: {error}") from error


def _decoder(kind: type[_Message]) -> msgspec.json.Decoder[_Message]:
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(kind)
    return _decoders[kind]


def request_of(batch: AnyBatch) -> bytes:
    """Encode a batch as a request of its method.

    Raises:
        UnicodeEncodeError, TypeError: It is not plain data.
    """
    match batch:
        case StepBatch():
            return encode(StepRequest([Step(item.log, _raw(item.metadata), item.episode) for item in batch.items]))
        case ResetBatch() | TrialsBatch():
            return encode(ResetRequest([_episode_item(episode) for episode in batch.episodes]))
        case GroupBatch():
            return encode(GroupRequest([_member_item(member) for member in batch.members]))
    return encode(CloseRequest([End(end.id, end.reason, _raw(end.metadata)) for end in batch.ends]))


def batch_of(data: bytes, method: str) -> AnyBatch:
    """Read the batch in a request of a method.

    Raises:
        RequestRefused: It is no request of this method.
    """
    if method == StepBatch.method:
        steps = decode_request(data, StepRequest).steps
        return StepBatch([StepItem(item.log, _value(item.metadata), item.episode) for item in steps])
    if method == ResetBatch.method:
        return ResetBatch([_episode(item) for item in decode_request(data, ResetRequest).episodes])
    if method == TrialsBatch.method:
        return TrialsBatch([_episode(item) for item in decode_request(data, ResetRequest).episodes])
    if method == GroupBatch.method:
        return GroupBatch([_member(item) for item in decode_request(data, GroupRequest).members])
    ends = decode_request(data, CloseRequest).ends
    return CloseBatch([EpisodeEnd(id=end.id, metadata=_value(end.metadata), reason=end.reason) for end in ends])


def answer_of(batch: AnyBatch, results: Sequence[Any]) -> bytes:
    """Encode the results of a batch as its answer."""
    match batch:
        case StepBatch():
            return encode(StepAnswer([_outcome(item) for item in results], getattr(results, "answered", False)))
        case ResetBatch():
            return encode(ResetAnswer([_start(item) for item in results]))
        case GroupBatch():
            (scores,) = results
            return encode(GroupAnswer([Score(score.reward, _raw(score.metadata)) for score in scores]))
        case TrialsBatch():
            return encode(TrialsAnswer([_trials_item(item) for item in results]))
    return EMPTY


def decode_results(data: bytes, batch: AnyBatch) -> Sequence[Any]:
    """Read the results of a batch, and validate them again: whoever answers is not trusted.

    Raises:
        InvalidMessage: It is not a valid answer to the batch.
    """
    match batch:
        case StepBatch():
            answer = decode_answer(data, StepAnswer)
            _check_count(answer.outcomes, batch)
            return Outcomes([_received(item) for item in answer.outcomes], answered=answer.answered)
        case ResetBatch():
            starts = decode_answer(data, ResetAnswer).starts
            _check_count(starts, batch)
            return [_received_start(item) for item in starts]
        case GroupBatch():
            scores = decode_answer(data, GroupAnswer).scores
            _check_count(scores, batch)
            return [_received_scores(scores)]
        case TrialsBatch():
            trials = decode_answer(data, TrialsAnswer).trials
            _check_count(trials, batch)
            return [_received_trials(item) for item in trials]
    return [None] * len(batch)


def decode_rows(data: bytes) -> list[Any]:
    """Read the rows in an answer.

    Raises:
        InvalidMessage: They are not valid rows.
    """
    try:
        return [parse(bytes(row), "a row") for row in decode_answer(data, RowsAnswer).rows]
    except NotPlain as error:
        raise InvalidMessage(f"its answer is invalid: {error}") from error


def decode_metrics(data: bytes) -> bytes:
    """Read the metrics in an answer, as the JSON text of an object.

    Raises:
        InvalidMessage: They are none.
    """
    text = bytes(decode_answer(data, PostProcessAnswer).metrics)
    try:
        found = orjson.loads(text)
    except ValueError as error:
        raise InvalidMessage(f"its metrics are not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidMessage("its metrics are not an object")
    return text


def fault_message(fault: EnvironmentFault) -> Fault:
    """The message of a fault."""
    kind: FaultKind = next((kind for kind, known in _FAULTS.items() if isinstance(fault, known)), "raised")
    cause = fault.cause
    return Fault(kind, str(fault), fault.traceback, cause.reason, cause.evidence or None)


def decode_fault(data: bytes) -> EnvironmentFault:
    """Read the fault that a call has ended with.

    Raises:
        InvalidMessage: There is none.
    """
    return _fault(decode_answer(data, Fault))


def wrap_call(method: str, request: bytes = EMPTY) -> bytes:
    """A call over a channel: over HTTP the path names the method."""
    return b"%s\n%s" % (method.encode(), request)


def unwrap_call(data: bytes) -> tuple[str, bytes]:
    """Method and request of a call over a channel."""
    method, _, request = data.partition(b"\n")
    return method.decode(), request


def wrap_answer(answer: bytes) -> bytes:
    """An answer over a channel: over HTTP the status tells it from a fault."""
    return b"+" + answer


def wrap_fault(fault: EnvironmentFault) -> bytes:
    """A fault as the end of a call over a channel."""
    # Only who waits for a process says that it is late.
    raised = StepRaised(str(fault), fault.traceback, cause=fault.cause) if isinstance(fault, StepTimedOut) else fault
    return b"-" + encode(fault_message(raised))


def unwrap_answer(data: bytes) -> bytes:
    """The answer to a call over a channel.

    Raises:
        EnvironmentFault: The call has failed.
        InvalidMessage: It is neither an answer nor a fault that a process may have.
    """
    if data.startswith(b"-"):
        raise _of_process(decode_fault(data[1:]))
    if not data.startswith(b"+"):
        raise InvalidMessage("it has sent neither an answer nor a fault")
    return data[1:]


def unwrap_results(data: bytes, batch: AnyBatch) -> Sequence[Any]:
    """The results of a batch that was called over a channel, as in `decode_results`.

    Raises:
        EnvironmentFault, InvalidMessage: As `unwrap_answer` does, or it is not a valid answer to the batch.
    """
    if isinstance(batch, CloseBatch):
        unwrap_empty(data)
    results = decode_results(unwrap_answer(data), batch)
    for result in results:
        if isinstance(result, EnvironmentFault):
            _of_process(result)
    return results


def unwrap_empty(data: bytes) -> None:
    """Check an answer over a channel that says no more than that it is one.

    Raises:
        EnvironmentFault, InvalidMessage: As `unwrap_answer` does, or it says more.
    """
    if unwrap_answer(data) != EMPTY:
        raise InvalidMessage("its answer is one to another request")


def _of_process(fault: EnvironmentFault) -> EnvironmentFault:
    """The fault that a process has sent, which cannot know that it is late."""
    if isinstance(fault, StepTimedOut):
        raise InvalidMessage("it says of itself that it is late")
    return fault


def raw(text: bytes) -> msgspec.Raw:
    """JSON text as a part of a message."""
    return msgspec.Raw(text)


def _fault(message: Fault) -> EnvironmentFault:
    traceback = message.traceback
    cause = None
    if message.reason is not None and message.reason in REASONS:
        cause = Cause(message.reason, (message.evidence or NO_EVIDENCE).bounded())
    return _FAULTS[message.kind](message.text, None if traceback is None else traceback.bounded(), cause=cause)


def _check_count(answered: Sequence[Any], batch: AnyBatch) -> None:
    expected = len(batch.members) if isinstance(batch, GroupBatch) else len(batch)
    if len(answered) != expected:
        raise InvalidMessage(f"its answer has {len(answered)} outcomes for {expected} trajectories")


def _outcome(outcome: StepOutcome | EnvironmentFault) -> Outcome:
    if isinstance(outcome, EnvironmentFault):
        return Outcome(fault=fault_message(outcome))
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


def _received(item: Outcome) -> StepOutcome | EnvironmentFault:
    if item.fault is not None:
        return _fault(item.fault)
    try:
        outcome = StepOutcome(
            role="environment" if item.role is msgspec.UNSET else item.role,
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
    except StepInvalid as fault:
        return fault
    return outcome


def _start(start: EpisodeStart | EnvironmentFault) -> Start:
    if isinstance(start, EnvironmentFault):
        return Start(fault=fault_message(start))
    return Start(
        messages=[dict(message) for message in start.messages],
        metadata=_raw(start.metadata),
        stop_strings=None if start.stop_strings is None else list(start.stop_strings),
        tools=None if start.tools is None else list(start.tools),
    )


def _received_start(item: Start) -> EpisodeStart | EnvironmentFault:
    if item.fault is not None:
        return _fault(item.fault)
    try:
        state = _state(item.metadata)
        return check_start(
            EpisodeStart(messages=item.messages, metadata=state, stop_strings=item.stop_strings, tools=item.tools)
        )
    except StepInvalid as fault:
        return fault


def _received_scores(items: Sequence[Score]) -> list[GroupScore] | EnvironmentFault:
    try:
        scores = [GroupScore(reward=item.reward, metadata=_state(item.metadata)) for item in items]
        return split_scores(scores, len(items))
    except StepInvalid as fault:
        return fault


def _trials_item(trials: Trials | EnvironmentFault) -> TrialsItem:
    if isinstance(trials, EnvironmentFault):
        return TrialsItem(fault=fault_message(trials))
    return TrialsItem(
        solutions={name: list(responses) for name, responses in trials.solutions.items()},
        attacks={name: list(responses) for name, responses in trials.attacks.items()},
        full_reward=trials.full_reward,
    )


def _received_trials(item: TrialsItem) -> Trials | EnvironmentFault:
    if item.fault is not None:
        return _fault(item.fault)
    try:
        return check_trials(Trials(solutions=item.solutions, attacks=item.attacks, full_reward=item.full_reward))
    except (NotPlain, StepInvalid) as error:
        return StepInvalid(str(error))


def _episode_item(episode: Episode) -> EpisodeItem:
    return EpisodeItem(
        id=episode.id,
        messages=list(episode.messages),
        metadata=_raw(episode.metadata),
        seed=episode.seed,
        max_turns=episode.max_turns,
        tools=None if episode.tools is None else list(episode.tools),
    )


def _episode(item: EpisodeItem) -> Episode:
    return Episode(
        id=item.id,
        messages=item.messages,
        metadata=_value(item.metadata),
        seed=item.seed,
        max_turns=item.max_turns,
        tools=item.tools,
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
        messages=item.messages,
        metadata=_value(item.metadata),
        reward=item.reward,
        stop_reason=item.stop_reason,
        answer=item.answer,
        group_reward=item.group_reward,
    )


def _raw(metadata: Metadata) -> msgspec.Raw:
    return NULL if metadata is None else msgspec.Raw(orjson.dumps(metadata))


def _state(text: msgspec.Raw) -> Metadata:
    """Read metadata.

    Raises:
        StepInvalid: It is no object of plain data.
    """
    if text is NULL:
        return None
    try:
        found = parse(bytes(text), "metadata")
    except NotPlain as error:
        raise StepInvalid(str(error)) from error
    if found is not None and not isinstance(found, dict):
        raise StepInvalid("metadata is not an object")
    return found


def _value(text: msgspec.Raw) -> Metadata:
    """Read the metadata of a request."""
    try:
        return _state(text)
    except StepInvalid as fault:
        raise RequestRefused(str(fault)) from fault
