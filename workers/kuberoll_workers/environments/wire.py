"""Messages between a worker and the process of an environment: plain data in MessagePack, a length before each.

Neither side ever runs what the other one sent: there is no pickle in it. Metadata travels as its JSON text, so that
what arrives is plain data or is refused.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec
import orjson

from kuberoll_workers.data.plain import NotPlain, parse
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
"""Bytes of the largest message; a longer one ends the process that announced it."""

FaultKind = Literal["raised", "invalid", "row"]

_FAULTS: dict[FaultKind, type[EnvironmentFault]] = {"raised": StepRaised, "invalid": StepInvalid, "row": RowFault}


class Garbled(ValueError):
    """What arrived is no message; whoever sent it is not to be spoken to any more."""


class Start(msgspec.Struct, array_like=True):
    """The first message to the process: the environment, and its sandbox. `config` is a JSON text."""

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
    """Asks for dataset rows."""

    count: int
    seed: int


class Rows(msgspec.Struct, array_like=True, tag="rows"):
    """Some dataset rows, as JSON texts; none: that were all."""

    rows: list[bytes]


class Outcome(msgspec.Struct, array_like=True, tag="outcome"):
    """A `StepOutcome`; metadata as its JSON text."""

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


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """What a step came to, one entry per trajectory; or, to `Start`, that the environment is ready: none."""

    answered: bool
    outcomes: list[Outcome | Fault]


_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer | Fault)
_rows = msgspec.msgpack.Decoder(Rows | Fault)
_requests = msgspec.msgpack.Decoder(Step | Generate)
_starts = msgspec.msgpack.Decoder(Start)


def encode(message: Start | Step | Generate | Answer | Rows | Fault) -> bytes:
    """A message with its length before it.

    Raises:
        UnicodeEncodeError, TypeError: It holds a text that is no valid Unicode, or no plain data.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        raise TypeError(f"a message of {len(data)} bytes is longer than {MAX_MESSAGE}")
    return HEADER.pack(len(data)) + data


def length(header: bytes) -> int:
    """The length that a header announces.

    Raises:
        Garbled: No message is so long.
    """
    (size,) = HEADER.unpack(header)
    if size > MAX_MESSAGE:
        raise Garbled(f"it announced a message of {size} bytes")
    return int(size)


def decode_start(data: bytes) -> Start:
    return _starts.decode(data)


def decode_request(data: bytes) -> Step | Generate:
    request: Step | Generate = _requests.decode(data)
    return request


def inputs_of(step: Step) -> tuple[list[list[ChatMessage]], list[Metadata]]:
    """The chat logs and the metadata of a step."""
    logs: list[list[ChatMessage]] = [list(log) for log in step.logs]
    return logs, [None if text is None else orjson.loads(text) for text in step.metadata]


def step_of(logs: list[list[ChatMessage]], metadata: list[Metadata]) -> Step:
    """A step as a message.

    Raises:
        TypeError: Metadata is no plain data.
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
    return Fault(kind, str(fault))


def decode_answer(data: bytes, size: int) -> Outcomes:
    """The outcomes of a step, checked as if no other process had: the other one may be in anybody's hands.

    Args:
        size: Number of trajectories that were stepped.

    Raises:
        Garbled: It is no answer to such a step.
        EnvironmentFault: What the step as a whole failed of.
    """
    try:
        answer = _answers.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Garbled(f"its answer is none: {error}") from error
    if isinstance(answer, Fault):
        raise _fault(answer)
    if len(answer.outcomes) != size:
        raise Garbled(f"its answer has {len(answer.outcomes)} outcomes for {size} trajectories")
    return Outcomes([_received(item) for item in answer.outcomes], answered=answer.answered)


def decode_rows(data: bytes) -> list[Any]:
    """Some rows; none: that were all.

    Raises:
        Garbled: They are no rows.
        EnvironmentFault: Why there are none.
    """
    try:
        answer = _rows.decode(data)
        if isinstance(answer, Rows):
            return [parse(row, "a row") for row in answer.rows]
    except (msgspec.DecodeError, UnicodeDecodeError, NotPlain) as error:
        raise Garbled(f"its answer is none: {error}") from error
    raise _fault(answer)


def _received(item: Outcome | Fault) -> StepOutcome | EnvironmentFault:
    if isinstance(item, Fault):
        return _fault(item)
    try:
        state: Any = None if item.metadata is None else parse(item.metadata, "metadata")
        if state is not None and not isinstance(state, dict):
            raise StepInvalid("metadata is no object")
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
    return _FAULTS[message.kind](message.text)
