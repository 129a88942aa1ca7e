"""Messages between a worker and an environment's process: plain data in MessagePack, each with a length prefix.

There is no pickle: neither side executes anything that the other one sends. Metadata is sent as JSON text, so received
metadata is plain data or rejected.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec
import orjson

from kuberoll_workers.data.plain import NotPlain, parse
from kuberoll_workers.data.tracebacks import Traceback
from kuberoll_workers.environments.interface import ChatMessage, Metadata
from kuberoll_workers.environments.outcome import (
    EnvironmentFault,
    Outcomes,
    RowFault,
    StepInvalid,
    StepOutcome,
    StepRaised,
    check_outcome,
)

HEADER = struct.Struct(">I")
MAX_MESSAGE = 256 << 20
"""Maximum size of a message in bytes; a process that announces a longer one is ended."""

FaultKind = Literal["raised", "invalid", "row"]

_FAULTS: dict[FaultKind, type[EnvironmentFault]] = {"raised": StepRaised, "invalid": StepInvalid, "row": RowFault}


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


class Step(msgspec.Struct, array_like=True, tag="step"):
    """One batched step; metadata as JSON texts."""

    logs: list[list[dict[str, str]]]
    metadata: list[bytes | None]


class Generate(msgspec.Struct, array_like=True, tag="generate"):
    """Request for dataset rows."""

    count: int
    seed: int


class Rows(msgspec.Struct, array_like=True, tag="rows"):
    """Some dataset rows, as JSON texts; empty at the end."""

    rows: list[bytes]


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


class Fault(msgspec.Struct, array_like=True, tag="fault"):
    """An `EnvironmentFault`."""

    kind: FaultKind
    text: str
    traceback: Traceback | None = None


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """Outcomes of a step, one per trajectory; or the answer to `Start`, without outcomes, when the environment is
    ready.
    """

    answered: bool
    outcomes: list[Outcome | Fault]


_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer | Fault)
_rows = msgspec.msgpack.Decoder(Rows | Fault)
_requests = msgspec.msgpack.Decoder(Step | Generate)
_starts = msgspec.msgpack.Decoder(Start)


def encode(message: Start | Step | Generate | Answer | Rows | Fault) -> bytes:
    """A message with its length prefix.

    Raises:
        UnicodeEncodeError, TypeError: It contains invalid Unicode, or is not plain data.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        raise TypeError(f"a message of {len(data)} bytes is longer than {MAX_MESSAGE}")
    return HEADER.pack(len(data)) + data


def length(header: bytes) -> int:
    """Size of the message that a header announces.

    Raises:
        InvalidMessage: It exceeds MAX_MESSAGE.
    """
    (size,) = HEADER.unpack(header)
    if size > MAX_MESSAGE:
        raise InvalidMessage(f"it announced a message of {size} bytes")
    return int(size)


def decode_start(data: bytes) -> Start:
    return _starts.decode(data)


def decode_request(data: bytes) -> Step | Generate:
    request: Step | Generate = _requests.decode(data)
    return request


def inputs_of(step: Step) -> tuple[list[list[ChatMessage]], list[Metadata]]:
    """Chat logs and metadata of a step."""
    logs: list[list[ChatMessage]] = [list(log) for log in step.logs]
    return logs, [None if text is None else orjson.loads(text) for text in step.metadata]


def step_of(logs: list[list[ChatMessage]], metadata: list[Metadata]) -> Step:
    """A step as a message.

    Raises:
        TypeError: Metadata is not plain data.
    """
    return Step(logs, [None if state is None else orjson.dumps(state) for state in metadata])


def answer_of(outcomes: Outcomes) -> Answer:
    """A step's outcomes as a message."""
    return Answer(
        outcomes.answered,
        [fault_message(item) if isinstance(item, EnvironmentFault) else _outcome_message(item) for item in outcomes],
    )


def fault_message(fault: EnvironmentFault) -> Fault:
    """A fault as a message."""
    kind: FaultKind = (
        "row" if isinstance(fault, RowFault) else "invalid" if isinstance(fault, StepInvalid) else "raised"
    )
    return Fault(kind, str(fault), fault.traceback)


def decode_answer(data: bytes, size: int) -> Outcomes:
    """Outcomes of a step, validated again: the process is not trusted.

    Args:
        size: Number of trajectories that were stepped.

    Raises:
        InvalidMessage: It is not a valid answer to the step.
        EnvironmentFault: The whole step failed.
    """
    try:
        answer = _answers.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"its answer is invalid: {error}") from error
    if isinstance(answer, Fault):
        raise _fault(answer)
    if len(answer.outcomes) != size:
        raise InvalidMessage(f"its answer has {len(answer.outcomes)} outcomes for {size} trajectories")
    return Outcomes([_received(item) for item in answer.outcomes], answered=answer.answered)


def decode_rows(data: bytes) -> list[Any]:
    """Some rows; empty at the end.

    Raises:
        InvalidMessage: They are not valid rows.
        EnvironmentFault: The generation of rows failed.
    """
    try:
        answer = _rows.decode(data)
        if isinstance(answer, Rows):
            return [parse(row, "a row") for row in answer.rows]
    except (msgspec.DecodeError, UnicodeDecodeError, NotPlain) as error:
        raise InvalidMessage(f"its answer is invalid: {error}") from error
    raise _fault(answer)


def _received(item: Outcome | Fault) -> StepOutcome | EnvironmentFault:
    if isinstance(item, Fault):
        return _fault(item)
    try:
        state: Any = None if item.metadata is None else parse(item.metadata, "metadata")
        if state is not None and not isinstance(state, dict):
            raise StepInvalid("metadata is not an object")
        outcome = StepOutcome(
            role=item.role,
            content=item.content,
            metadata=state,
            stop_strings=tuple(item.stop_strings) if item.stop_strings else None,
            reward=item.reward,
            terminated=item.terminated,
            reward_parts=item.reward_parts,
            answer=item.answer,
        )
        check_outcome(outcome)
    except ValueError as error:
        return StepInvalid(str(error))
    except StepInvalid as fault:
        return fault
    return outcome


def _outcome_message(outcome: StepOutcome) -> Outcome:
    return Outcome(
        outcome.role,
        outcome.content,
        None if outcome.metadata is None else orjson.dumps(outcome.metadata),
        None if outcome.stop_strings is None else list(outcome.stop_strings),
        outcome.reward,
        outcome.terminated,
        dict(outcome.reward_parts),
        outcome.answer,
    )


def _fault(message: Fault) -> EnvironmentFault:
    traceback = message.traceback
    return _FAULTS[message.kind](message.text, None if traceback is None else traceback.bounded())
