"""The trajectory record: one JSON line per finished trajectory, one per failed one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy
import orjson

from kuberoll_workers.data.messages import Message

StopReason = Literal["terminated", "truncated", "max_turns", "failed"]
"""How a trajectory ended: by the environment, by a length limit, by the turn limit, or not at all."""

DropReason = Literal["oversampled", "filtered"]
"""Why a trajectory is not wanted: enough siblings finished before it, or its group was filtered out."""

FailureKind = Literal["infrastructure", "environment", "data", "model"]
"""Who is at fault: the machines, the environment's code, the dataset's row, or what the policy returned."""


TokenSource = Literal["engine", "reencoded"]
"""Where the ids of responses come from: the engine that sampled them, or an encoding of the text that it told."""


class TrajectoryKey(NamedTuple):
    """What a trajectory is known by within its run."""

    task_index: int
    rollout_index: int


@dataclass(slots=True)
class TokenCounts:
    """Tokens of a trajectory by who wrote them."""

    prompt: int
    generated: int
    environment: int


@dataclass(slots=True)
class Timing:
    """Wall seconds of each turn, in turn order."""

    generation_seconds: list[float]
    environment_seconds: list[float]


@dataclass(slots=True)
class TrajectoryRecord:
    """A finished trajectory, as it is stored.

    `rewards` has one entry per turn and sums to `total_reward`; `reward_parts` holds the named components, where an
    environment names them, each with one entry per turn. `token_source` is `reencoded` where that is so of any turn;
    stored lines leave it out where it is `engine`.
    """

    task_index: int
    rollout_index: int
    task_name: str
    idx: Any
    messages: list[Message]
    total_reward: float
    rewards: list[float]
    stop_reason: StopReason
    turn_count: int
    tokens: TokenCounts
    timing: Timing
    metadata: dict[str, Any] | None
    seed: int | None
    attempt: int
    reward_parts: dict[str, list[float]] = field(default_factory=dict)
    answer: str | None = None
    token_source: TokenSource = "engine"

    @property
    def key(self) -> TrajectoryKey:
        return TrajectoryKey(self.task_index, self.rollout_index)


@dataclass(slots=True)
class FailureRecord:
    """A trajectory that was given up: why, after how many tries, and what it had until then.

    Attributes:
        metadata: The episode's state after its last complete turn.
    """

    task_index: int
    rollout_index: int
    task_name: str
    idx: Any
    kind: FailureKind
    stage: str
    cause: str
    tries: int
    attempt: int
    turn_count: int
    seed: int | None
    messages: list[Message]
    metadata: dict[str, Any] | None = None
    stop_reason: Literal["failed"] = "failed"

    @property
    def key(self) -> TrajectoryKey:
        return TrajectoryKey(self.task_index, self.rollout_index)


@dataclass(slots=True)
class DroppedRecord:
    """A trajectory that nobody wanted in the end: as far as it got.

    Attributes:
        stop_reason: How it ended; None: it was stopped on its way.
        turn_count, rewards, total_reward, tokens, messages, metadata: Of its complete turns.
    """

    task_index: int
    rollout_index: int
    task_name: str
    idx: Any
    reason: DropReason
    stop_reason: StopReason | None
    turn_count: int
    total_reward: float
    rewards: list[float]
    tokens: TokenCounts
    messages: list[Message]
    metadata: dict[str, Any] | None
    seed: int | None
    attempt: int

    @property
    def key(self) -> TrajectoryKey:
        return TrajectoryKey(self.task_index, self.rollout_index)


@dataclass(slots=True)
class TurnRecord:
    """One complete turn: with all earlier ones, everything that is needed to continue after it.

    Attributes:
        messages: The response and the observation.
        metadata: The episode's state after the turn.
        stop_strings: Of the next generation.
        stop_reason: How the trajectory ended with this turn; None: it goes on.
        token_source: Of the response; left out of stored lines where it is `engine`.
    """

    task_index: int
    rollout_index: int
    attempt: int
    turn: int
    messages: list[Message]
    reward: float
    reward_parts: dict[str, float]
    metadata: dict[str, Any] | None
    stop_strings: list[str] | None
    answer: str | None
    generation_seconds: float
    environment_seconds: float
    stop_reason: StopReason | None = None
    token_source: TokenSource = "engine"

    @property
    def key(self) -> TrajectoryKey:
        return TrajectoryKey(self.task_index, self.rollout_index)


@dataclass(slots=True)
class Partial:
    """The complete turns of a trajectory that was interrupted, in order from the first; never changed once made."""

    turns: list[TurnRecord]

    @property
    def key(self) -> TrajectoryKey:
        return self.turns[0].key


AnyRecord = TrajectoryRecord | FailureRecord | DroppedRecord | TurnRecord


class RecordError(ValueError):
    """A stored line is not the record it should be."""


def _plain(value: object) -> object:
    """orjson writes numpy arrays at C speed and float32 in its shortest form; `array` shares its memory with one."""
    if isinstance(value, array):
        return numpy.asarray(value)
    raise TypeError(f"{type(value).__name__} cannot be stored in a trajectory")


_ENGINE_TOKENS = b',"token_source":"engine"}\n'


def encode_line(record: AnyRecord) -> bytes:
    """One JSON line, its newline included.

    Raises:
        TypeError: The metadata or idx holds something that JSON has no form for.
    """
    line = orjson.dumps(record, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    if isinstance(record, TrajectoryRecord | TurnRecord) and record.token_source == "engine":
        # orjson writes every field; this one is the last, and what nearly all lines would say of it goes without.
        return line.removesuffix(_ENGINE_TOKENS) + b"}\n"
    return line


_Record = TypeVar("_Record", TrajectoryRecord, FailureRecord, DroppedRecord, TurnRecord)


def decode_line(line: bytes, kind: type[_Record], *, where: str) -> _Record:
    """Parse and check one stored line.

    Args:
        where: Names the line in errors, `file:line`.

    Raises:
        RecordError: The line is not JSON, or not this record.
    """
    try:
        record = msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise RecordError(f"{where}: not a {kind.__name__}: {error}") from error
    if isinstance(record, TrajectoryRecord | TurnRecord):
        _check_lengths(record.messages, where)
    return record


def _check_lengths(messages: Sequence[Message], where: str) -> None:
    for number, message in enumerate(messages):
        if message.logprobs is not None and len(message.logprobs) != len(message.token_ids):
            raise RecordError(
                f"{where}: messages[{number}] has {len(message.token_ids)} token_ids "
                f"but {len(message.logprobs)} logprobs"
            )
