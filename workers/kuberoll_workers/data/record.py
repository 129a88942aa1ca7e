"""Trajectory records: one JSON line per finished, failed or dropped trajectory, and per turn."""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy
import orjson

from kuberoll_api.model.sampling_fields import CORE
from kuberoll_workers.data.causes import KINDS_OF_OLD, FailureKind, ReasonName
from kuberoll_workers.data.incidents import Incident
from kuberoll_workers.data.messages import ExtendedMessage, Message, check_authorship
from kuberoll_workers.data.plain import NotPlain, already_plain, is_finite, plain, printable, repr_of
from kuberoll_workers.data.stop_reasons import DropReason, StopReason
from kuberoll_workers.data.tracebacks import Frame

TokenSource = Literal["engine", "reencoded"]
"""Source of a response's ids: the engine that sampled them, or a re-encoding of the returned text."""


class TrajectoryKey(NamedTuple):
    """Identity of a trajectory within its run."""

    task_index: int
    rollout_index: int


@dataclass(slots=True)
class TokenCounts:
    """Number of tokens of a trajectory, by author."""

    prompt: int
    generated: int
    environment: int


@dataclass(slots=True)
class Timing:
    """Wall-clock times of each turn.

    Attributes:
        generation_seconds, environment_seconds: How long it waited for its response, and for its environment.
        ended_at: Unix time of its end, by the clock of the worker's machine; None if unknown. Empty in records of
            versions that did not store it.
    """

    generation_seconds: list[float]
    environment_seconds: list[float]
    ended_at: list[float | None] = field(default_factory=list)


@dataclass(slots=True)
class Branch:
    """A further path of an agent's trajectory: it forked from another, or began with a prompt of its own.

    Attributes:
        messages: From its root, as a trajectory's.
        learn: Numbers of the responses in `messages` that no earlier path of the trajectory has.
        timing: Of its turns; those that another path has, too, are in both.
        sampling: As in `TrajectoryRecord`, of the responses in `messages`.
    """

    messages: list[Message]
    learn: list[int]
    timing: Timing
    sampling: list[dict[str, Any] | None] | None = None


@dataclass(slots=True)
class TrajectoryRecord:
    """A finished trajectory in its stored form.

    `rewards` has one entry per turn, and `group_reward` is what the environment gave it within its prompt group (None
    if it does not score groups); they sum to `total_reward`. `reward_parts` holds the components that an environment
    names, each with one entry per turn. `token_source` is `reencoded` if that holds for any turn; stored lines omit it
    if it is `engine` and there are no `tools`. `tools` are those that were rendered in the prompt; lines omit them if
    there are none. Of an agent's trajectory, `branches` are the paths beside this one, which has the first response,
    and `continuity` counts all its calls by how they continued others; other lines omit both. `group_order` numbers its
    prompt group among those of its shard, in the order in which they begin, in runs that a trainer holds back
    (`rollout.onPolicy`); in other runs it is None, and lines omit it. `sampling` has for each response of `messages`
    the distribution that it was sampled from (`data.sampling`), None for one from the run's, which its manifest has;
    None, and omitted in lines, if all are from the run's. `incidents` are what went wrong on its way; None, and omitted
    in lines, if there are none.
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
    group_reward: float | None = None
    token_source: TokenSource = "engine"
    tools: list[dict[str, Any]] | None = None
    branches: list[Branch] | None = None
    continuity: dict[str, int] | None = None
    group_order: int | None = None
    sampling: list[dict[str, Any] | None] | None = None
    incidents: list[Incident] | None = None

    @property
    def key(self) -> TrajectoryKey:
        return TrajectoryKey(self.task_index, self.rollout_index)


@dataclass(slots=True)
class FailureRecord:
    """A trajectory that failed permanently: cause, number of tries of the failed step, and its turns until then.

    Attributes:
        metadata: The episode's state after its last complete turn.
        row: Position of its dataset row, such as `file:line`; None if unknown, as in records of older versions.
        group_order: As in `TrajectoryRecord`.
        frames: The last frames in the person's own files, the outermost first; None without a traceback.
        traceback: The whole traceback of an exception in code of an environment.
        reason: Why, a name in `data.causes.REASONS`, which decides its kind; None in records of older versions.
        evidence: What shows it, as `Evidence.as_json`; None: nothing more than the cause.
        seconds, tokens: What was thrown away with it: time since it began here, and generated tokens; None: unknown.
        incidents: What went wrong before; None: nothing.
        turns: Of an unscored trajectory, whose newest response or whose group could not be scored, all that a later
            attempt needs to be scored without generating again; see `output.unscored`. None: it is not one.
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
    row: str | None = None
    frames: list[Frame] | None = None
    traceback: str | None = None
    reason: ReasonName | None = None
    evidence: dict[str, Any] | None = None
    seconds: float | None = None
    tokens: int | None = None
    incidents: list[Incident] | None = None
    turns: list[TurnRecord] | None = None
    group_order: int | None = None

    @property
    def key(self) -> TrajectoryKey:
        return TrajectoryKey(self.task_index, self.rollout_index)

    @property
    def unscored(self) -> bool:
        """True if it only lacks a score."""
        return self.turns is not None

    @property
    def outage(self) -> bool:
        """True if an outage left it unscored, so that a run tries it again by itself; not if the environment failed."""
        return self.unscored and self.kind != "environment"


@dataclass(slots=True)
class DroppedRecord:
    """A dropped trajectory, as far as it got.

    Attributes:
        stop_reason: How it ended; None if it was stopped before its end.
        turn_count, rewards, total_reward, tokens, messages, metadata: Values of its complete turns.
        group_reward: As in `TrajectoryRecord`, if its group was filtered out.
        incidents: What went wrong on its way; None: nothing.
        group_order: As in `TrajectoryRecord`.
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
    group_reward: float | None = None
    incidents: list[Incident] | None = None
    group_order: int | None = None

    @property
    def key(self) -> TrajectoryKey:
        return TrajectoryKey(self.task_index, self.rollout_index)


@dataclass(slots=True)
class TurnRecord:
    """One turn; together with all earlier ones, it suffices to continue after it.

    Attributes:
        messages: The response and the observation, which may have several messages. The response alone: the turn is not
            complete, its response waits for the environment, and what follows from its step has no meaning.
        metadata: The episode's state after the turn.
        stop_strings: Stop strings of the next generation.
        stop_reason: How the trajectory ended with this turn; None if it continues.
        ended_at: Unix time of its end; None if unknown.
        prompt: Digest of what the trajectory began with, on the first turn (`provenance.prompt_digest`): a run that
            would begin it otherwise starts it over. None on later turns, and in logs of older versions.
        prompt_messages: Messages that the environment's `reset` added to the prompt, on the first turn; None if there
            are none.
        token_source: Source of the response's ids; omitted in stored lines if it is `engine`, without `tools`.
        tools: Tools that the environment's `reset` declared, on the first turn; omitted in stored lines if it declared
            none.
        incidents: What went wrong since the turn before; omitted in stored lines if nothing did.
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
    ended_at: float | None = None
    prompt: str | None = None
    prompt_messages: list[dict[str, str]] | None = None
    token_source: TokenSource = "engine"
    tools: list[dict[str, Any]] | None = None
    incidents: list[Incident] | None = None

    @property
    def key(self) -> TrajectoryKey:
        return TrajectoryKey(self.task_index, self.rollout_index)

    @property
    def is_complete(self) -> bool:
        """False if its response waits for the environment."""
        return len(self.messages) > 1


@dataclass(slots=True)
class Partial:
    """The turns of an interrupted or unscored trajectory, in order; immutable."""

    turns: list[TurnRecord]

    @property
    def key(self) -> TrajectoryKey:
        return self.turns[0].key


AnyRecord = TrajectoryRecord | FailureRecord | DroppedRecord | TurnRecord


def set_turns_to_score(failure: FailureRecord, turns: Sequence[TurnRecord]) -> None:
    """Mark a failure as an unscored trajectory.

    Args:
        turns: All of its turns. Their messages, and the state after them, are not stored twice.
    """
    failure.turns = [replace(turn, messages=[], metadata=None, incidents=None) for turn in turns]


class RecordError(ValueError):
    """A stored line is not a valid record."""


class Unstorable(ValueError):
    """A record contains something that a line of JSON cannot restore; the message names its path."""


def encode_branches(branches: Sequence[Branch]) -> bytes:
    """The branches of a stored trajectory as JSON, from which `decode_branches` restores them."""
    return orjson.dumps(branches, default=_arrays, option=orjson.OPT_SERIALIZE_NUMPY)


def decode_branches(text: bytes | str) -> list[Branch]:
    """The branches of `encode_branches`.

    Raises:
        msgspec.DecodeError: They are none.
        ValueError: It is not clear which messages are responses.
    """
    branches = msgspec.json.decode(text, type=list[Branch])
    line = text.encode() if isinstance(text, str) else text
    for number, branch in enumerate(branches):
        check_authorship(branch.messages, f"branches[{number}].", written=_SAMPLED in line)
    for branch, further in zip(branches, msgspec.json.decode(text, type=list[_MessageFields]), strict=True):
        branch.messages = _with_fields(branch.messages, further.messages)
    return branches


def _arrays(value: object) -> object:
    """orjson writes numpy arrays at C speed and float32 in its shortest form; `array` shares its memory with one."""
    if isinstance(value, array):
        return numpy.frombuffer(value, value.typecode)
    raise TypeError(f"{type(value).__name__} cannot be stored in a trajectory")


_INCIDENTS = b',"incidents":'
_NO_INCIDENTS = b',"incidents":null}\n'
_SAMPLING = b',"sampling":'
_NO_SAMPLING = b',"sampling":null}\n'
_NO_ORDER = b',"group_order":null}\n'
_NO_AGENT = b',"branches":null,"continuity":null}\n'
_NO_TOOLS = b',"tools":null}\n'
_ENGINE_TOKENS_NO_TOOLS = b',"token_source":"engine","tools":null}\n'


def encode_line(record: AnyRecord) -> bytes:
    """One JSON line including its newline, from which `decode_line` restores the record.

    Raises:
        Unstorable: The record has a non-finite number, an integer beyond 64 bits, metadata or an idx that is not plain
            data, or invalid Unicode.
    """
    try:
        record = _checked(record)
        line = orjson.dumps(record, default=_arrays, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    except (ValueError, TypeError) as error:
        raise Unstorable(f"trajectory {tuple(record.key)}: {error}") from error
    if not isinstance(record, TrajectoryRecord | TurnRecord):
        return _usual_omitted(record, line)
    if record.incidents is None:
        line = line.removesuffix(_NO_INCIDENTS) + b"}\n"
        return _without_defaults(record, line) if isinstance(record, TurnRecord) else _usual_omitted(record, line)
    # The last field; its values have fixed names, and quotes in texts have backslashes.
    line, _, incidents = line.rpartition(_INCIDENTS)
    return _usual_omitted(record, line + b"}\n").removesuffix(b"}\n") + _INCIDENTS + incidents


def _usual_omitted(record: AnyRecord, line: bytes) -> bytes:
    # orjson writes every field; these are the last, and their usual values are omitted.
    if isinstance(record, TurnRecord):
        return _without_defaults(record, line)
    if isinstance(record, TrajectoryRecord):
        if record.sampling is not None:
            # Its values are numbers and names of parameters.
            line, _, sampling = line.rpartition(_SAMPLING)
            rest = _without_last(record, line + b"}\n")
            return rest.removesuffix(b"}\n") + _SAMPLING + sampling
        line = line.removesuffix(_NO_SAMPLING) + b"}\n"
    return _without_last(record, line)


def _without_last(record: TrajectoryRecord | FailureRecord | DroppedRecord, line: bytes) -> bytes:
    if record.group_order is None:
        line = line.removesuffix(_NO_ORDER) + b"}\n"
        return _without_defaults(record, line) if isinstance(record, TrajectoryRecord) else line
    if isinstance(record, TrajectoryRecord):
        order = b',"group_order":%d}\n' % record.group_order
        line = line.removesuffix(order) + b"}\n"
        return _without_defaults(record, line).removesuffix(b"}\n") + order
    return line


def _without_defaults(record: TrajectoryRecord | TurnRecord, line: bytes) -> bytes:
    if isinstance(record, TrajectoryRecord):
        if not line.endswith(_NO_AGENT):
            return line
        line = line.removesuffix(_NO_AGENT) + b"}\n"
    if record.tools is not None:
        return line
    usual = _ENGINE_TOKENS_NO_TOOLS if record.token_source == "engine" else _NO_TOOLS
    return line.removesuffix(usual) + b"}\n"


def _checked(record: AnyRecord) -> AnyRecord:
    """The record, after a check for values that orjson would convert silently, such as NaN to null."""
    metadata = None if record.metadata is None else already_plain(record.metadata, "metadata")
    if metadata is not record.metadata:
        record = replace(record, metadata=metadata)
    _check_messages(record.messages)
    for branch in (isinstance(record, TrajectoryRecord) and record.branches) or ():
        _check_messages(branch.messages)
    _check_authors(record, written=True)
    if isinstance(record, TrajectoryRecord | TurnRecord) and record.tools is not None:
        plain(record.tools, "tools")
    if isinstance(record, TurnRecord):
        _finite("reward or seconds", (record.reward, record.generation_seconds, record.environment_seconds))
        _finite("ended_at", () if record.ended_at is None else (record.ended_at,))
        _finite("reward_parts", record.reward_parts.values())
        return record
    idx = already_plain(record.idx, "idx")
    if idx is not record.idx:
        record = replace(record, idx=idx)
    if isinstance(record, FailureRecord):
        for turn in record.turns or ():
            _checked(turn)
        return record
    _finite("total_reward", (record.total_reward,))
    _finite("group_reward", () if record.group_reward is None else (record.group_reward,))
    _finite("rewards", record.rewards)
    if isinstance(record, TrajectoryRecord):
        _finite("timing.generation_seconds", record.timing.generation_seconds)
        _finite("timing.environment_seconds", record.timing.environment_seconds)
        _finite("timing.ended_at", [moment for moment in record.timing.ended_at if moment is not None])
        for name, values in record.reward_parts.items():
            _finite(f"reward_parts.{name}", values)
    return record


def _check_messages(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages):
        if not (type(message.role) is str and type(message.content) is str):
            raise NotPlain(f"messages[{number}]: its role and its content must be texts")
        if isinstance(message, ExtendedMessage) and already_plain(message.fields, "fields") is not message.fields:
            raise NotPlain(f"messages[{number}].fields must consist of JSON's types")
        if (logprobs := message.logprobs) is None:
            continue
        if len(logprobs) != len(message.token_ids):
            raise NotPlain(f"messages[{number}] has {len(message.token_ids)} token_ids but {len(logprobs)} logprobs")
        # For short lists the sum is faster without an array.
        if not isfinite(sum(logprobs) if len(logprobs) < 512 else float(numpy.sum(numpy.asarray(logprobs)))):
            raise NotPlain(f"messages[{number}].logprobs: one of them is not finite")


def _finite(where: str, values: Iterable[float]) -> None:
    for value in values:
        if not is_finite(value):
            raise NotPlain(f"{where}: found {repr_of(value)}; it must be a finite number")


def failure_to_store(record: TrajectoryRecord | FailureRecord | DroppedRecord, error: Unstorable) -> FailureRecord:
    """Failure that replaces a record that cannot be stored: without metadata, its texts with escapes."""
    cause = f"it cannot be stored: {error}"
    if isinstance(record, FailureRecord):
        cause = f"{record.cause} ({cause})" if isinstance(record.cause, str) else cause
    failed = FailureRecord(
        task_index=record.task_index,
        rollout_index=record.rollout_index,
        task_name=record.task_name,
        idx=record.idx,
        kind=record.kind if isinstance(record, FailureRecord) else "environment",
        stage=record.stage if isinstance(record, FailureRecord) else "trajectory",
        cause=printable(cause),
        tries=record.tries if isinstance(record, FailureRecord) else 1,
        attempt=record.attempt,
        turn_count=record.turn_count,
        seed=record.seed,
        row=record.row if isinstance(record, FailureRecord) else None,
        frames=record.frames if isinstance(record, FailureRecord) else None,
        traceback=record.traceback if isinstance(record, FailureRecord) else None,
        reason=record.reason if isinstance(record, FailureRecord) else "EnvironmentInvalid",
        evidence=record.evidence if isinstance(record, FailureRecord) else None,
        seconds=record.seconds if isinstance(record, FailureRecord) else None,
        tokens=record.tokens if isinstance(record, FailureRecord) else record.tokens.generated,
        incidents=record.incidents,
        group_order=record.group_order,
        messages=[
            replace(
                message,
                role=printable(str(message.role)),
                content=printable(str(message.content), len(str(message.content))),
                logprobs=None,
            )
            for message in record.messages
        ],
    )
    try:
        encode_line(failed)
    except Unstorable:
        return replace(failed, idx=None, seed=None, messages=[])
    return failed


_Record = TypeVar("_Record", TrajectoryRecord, FailureRecord, DroppedRecord, TurnRecord)


def decode_line(line: bytes, kind: type[_Record], *, where: str) -> _Record:
    """Parse and validate one stored line.

    Args:
        where: Position for errors, `file:line`.

    Raises:
        RecordError: The line is not JSON, or not this record.
    """
    try:
        record = msgspec.json.decode(line, type=kind)
    except msgspec.ValidationError as error:
        if (older := _of_older(line, kind)) is None:
            raise RecordError(f"{where}: not a {kind.__name__}: {error}") from error
        record = older
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{where}: not a {kind.__name__}: {error}") from error
    for name, index in record.key._asdict().items():
        if not -_INDEXES <= index < _INDEXES:
            raise RecordError(f"{where}: not a {kind.__name__}: {name} does not fit into 64 bits")
    if isinstance(record, TrajectoryRecord | TurnRecord):
        _check_lengths(record.messages, where)
    try:
        _check_authors(record, written=_SAMPLED in line)
    except ValueError as error:
        raise RecordError(f"{where}: not a {kind.__name__}: {error}") from error
    if _FIELDS in line:
        record.messages = _extended(record.messages, line, where)
        if isinstance(record, TrajectoryRecord) and record.branches:
            _extend_branches(record.branches, line)
    return record


def _of_older(line: bytes, kind: type[_Record]) -> _Record | None:
    """The record of a line whose kind of failure has another name now; None: it is none."""
    if kind is not FailureRecord:
        return None
    found = msgspec.json.decode(line)
    if not (isinstance(found, dict) and found.get("kind") in KINDS_OF_OLD):
        return None
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert({**found, "kind": KINDS_OF_OLD[found["kind"]]}, type=kind)
    return None


_SAMPLED = b'"sampled":'
"""In every line that says of its messages whether the policy sampled them."""


def _check_authors(record: AnyRecord, *, written: bool) -> None:
    check_authorship(record.messages, written=written)
    if isinstance(record, TrajectoryRecord):
        _check_sampling(record.messages, record.sampling)
    for number, branch in enumerate((isinstance(record, TrajectoryRecord) and record.branches) or ()):
        check_authorship(branch.messages, f"branches[{number}].", written=written)
        _check_sampling(branch.messages, branch.sampling, f"branches[{number}].")


def _check_sampling(messages: Sequence[Message], sampling: Sequence[Any] | None, path: str = "") -> None:
    if sampling is None:
        return
    if len(sampling) != (responses := sum(message.sampled for message in messages)):
        raise ValueError(f"{path}sampling has {len(sampling)} entries for {responses} responses")
    if not all(found is None or found.keys() >= set(CORE) for found in sampling):
        raise ValueError(f"{path}sampling: each must have {', '.join(CORE)}")


_FIELDS = b'"fields":'
"""In every line with an `ExtendedMessage`: messages are decoded a second time only where it is."""


class _FieldsOnly(msgspec.Struct):
    fields: dict[str, Any] | None = None


class _MessageFields(msgspec.Struct):
    messages: list[_FieldsOnly]


def _extended(messages: Sequence[Message], line: bytes, where: str) -> list[Message]:
    """The messages of a line, with their further fields."""
    try:
        further = msgspec.json.decode(line, type=_MessageFields).messages
    except msgspec.ValidationError as error:
        raise RecordError(f"{where}: {error}") from error
    return _with_fields(messages, further)


def _with_fields(messages: Sequence[Message], further: Sequence[_FieldsOnly]) -> list[Message]:
    return [
        message if more.fields is None else ExtendedMessage(**_arguments(message), fields=more.fields)
        for message, more in zip(messages, further, strict=True)
    ]


class _BranchFields(msgspec.Struct):
    branches: list[_MessageFields]


def _extend_branches(branches: Sequence[Branch], line: bytes) -> None:
    found = msgspec.json.decode(line, type=_BranchFields).branches
    for branch, further in zip(branches, found, strict=True):
        branch.messages = _with_fields(branch.messages, further.messages)


def _arguments(message: Message) -> dict[str, Any]:
    """Arguments that make a copy of a message."""
    return {name: getattr(message, name) for name in _MESSAGE_FIELDS}


_MESSAGE_FIELDS = tuple(item.name for item in fields(Message))


_INDEXES = 1 << 63


class _Key(msgspec.Struct):
    task_index: int
    rollout_index: int


_KEY = msgspec.json.Decoder(_Key)
_WRITTEN_KEY = re.compile(rb'\{"task_index":(-?\d{1,18}),"rollout_index":(-?\d{1,18}),')


def key_of(line: bytes) -> TrajectoryKey | None:
    """Key of a stored line, whose other fields are ignored; None if it has none."""
    if written := _WRITTEN_KEY.match(line):
        # The form of `encode_line`: the rest of the line, which may be long, is not parsed.
        return TrajectoryKey(int(written[1]), int(written[2]))
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        key = TrajectoryKey(*msgspec.structs.astuple(_KEY.decode(line)))
        return key if all(-_INDEXES <= index < _INDEXES for index in key) else None
    return None


def _check_lengths(messages: Sequence[Message], where: str) -> None:
    for number, message in enumerate(messages):
        if message.logprobs is not None and len(message.logprobs) != len(message.token_ids):
            raise RecordError(
                f"{where}: messages[{number}] has {len(message.token_ids)} token_ids "
                f"but {len(message.logprobs)} logprobs"
            )
