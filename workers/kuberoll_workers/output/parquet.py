"""Trajectories as Parquet: the fields of a JSON line as columns, written when a shard is done."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import orjson

from kuberoll_workers.data.incidents import Incident
from kuberoll_workers.data.messages import (
    LOGPROB_TYPE,
    ExtendedMessage,
    Message,
    check_authorship,
    message_of,
    token_array,
)
from kuberoll_workers.data.record import (
    RecordError,
    Timing,
    TokenCounts,
    TrajectoryKey,
    TrajectoryRecord,
    decode_branches,
    encode_branches,
)

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_ROWS = 512
_GROUP_TOKENS = 1 << 20
_NAMED = {"idx", "metadata", "tools", "branches", "continuity", "sampling", "incidents"}
"""Columns with arbitrary JSON values, stored as JSON text."""
_NULLABLE = {
    *("seed", "answer", "group_reward", "tools", "branches", "continuity", "group_order", "sampling", "incidents"),
}
_TIMES = ("generation_seconds", "environment_seconds", "ended_at")


@cache
def schema() -> pyarrow.Schema:
    """Columns of a file; `reward_parts` is a list of names and values by turn.

    `idx`, `metadata`, `tools`, `branches`, `continuity`, `sampling`, `incidents` and a message's `fields` are JSON
    texts, all but the first two null where there are none.
    """
    import pyarrow as pa

    span = pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
    message = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("turn", pa.int32()),
            ("policy_versions", pa.list_(span)),
            ("truncated", pa.bool_()),
            ("fields", pa.string()),
            ("sampled", pa.bool_()),
        ]
    )
    part = pa.struct([("name", pa.string()), ("values", pa.list_(pa.float64()))])
    return pa.schema(
        [
            ("task_index", pa.int64()),
            ("rollout_index", pa.int64()),
            ("task_name", pa.string()),
            ("idx", pa.string()),
            ("messages", pa.list_(message)),
            ("total_reward", pa.float64()),
            ("rewards", pa.list_(pa.float64())),
            ("stop_reason", pa.string()),
            ("turn_count", pa.int32()),
            ("tokens", pa.struct([(name, pa.int64()) for name in ("prompt", "generated", "environment")])),
            (
                "timing",
                pa.struct([(name, pa.list_(pa.float64())) for name in _TIMES]),
            ),
            ("metadata", pa.string()),
            ("seed", pa.int64()),
            ("attempt", pa.int32()),
            ("reward_parts", pa.list_(part)),
            ("answer", pa.string()),
            ("token_source", pa.string()),
            ("group_reward", pa.float64()),
            ("tools", pa.string()),
            ("branches", pa.string()),
            ("continuity", pa.string()),
            ("group_order", pa.int64()),
            ("sampling", pa.string()),
            ("incidents", pa.string()),
        ]
    )


@cache
def _known_schemas() -> list[pyarrow.Schema]:
    """The schema, and those of earlier versions, for whose missing columns the record has defaults."""
    import pyarrow as pa

    without_incidents = schema().remove(len(schema()) - 1)
    without_sampling = without_incidents.remove(len(without_incidents) - 1)
    place = schema().get_field_index("messages")
    parts = list(schema().field(place).type.value_type)
    without_authors = without_sampling.set(place, pa.field("messages", pa.list_(pa.struct(parts[:-1]))))
    plain = pa.list_(pa.struct(parts[:-2]))
    without_order = without_authors.remove(len(without_authors) - 1)
    without_agents = without_order.remove(len(without_order) - 1).remove(len(without_order) - 2)
    without_tools = without_agents.remove(len(without_agents) - 1).set(place, pa.field("messages", plain))
    place = schema().get_field_index("timing")
    times = pa.struct([(name, pa.list_(pa.float64())) for name in _TIMES[:-1]])
    without_groups = without_tools.remove(len(without_tools) - 1)
    without_ends = without_groups.set(place, pa.field("timing", times))
    return [
        schema(),
        without_incidents,
        without_sampling,
        without_authors,
        without_order,
        without_agents,
        without_tools,
        without_groups,
        without_ends,
        without_ends.remove(len(without_ends) - 1),
    ]


def write_parquet(path: Path, records: Iterable[TrajectoryRecord]) -> int:
    """Write a file; returns the number of records. Memory: a row group of at most 512 records or a million tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = tokens = 0
    with pq.ParquetWriter(path, schema(), compression="zstd") as writer:
        batch: list[dict[str, Any]] = []
        for record in records:
            batch.append(_row(record))
            count += 1
            tokens += sum(len(message.token_ids) for message in record.messages)
            if len(batch) == _ROWS or tokens >= _GROUP_TOKENS:
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema()))
                batch, tokens = [], 0
        if batch:
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema()))
    return count


def read_parquet(path: Path, *, where: str, unreadable: Callable[[RecordError], None]) -> Iterator[TrajectoryRecord]:
    """Read a file, in batches.

    Args:
        where: Name of the file for errors.
        unreadable: Called for each row that is not a trajectory, with its number from 1; the row is skipped.

    Raises:
        RecordError: It is not a Parquet file, or not one of trajectories.
    """
    number = 0
    for batch in _batches(path, where, None):
        for row in batch.to_pylist():
            number += 1
            if (record := _readable(row, f"{where}: row {number}", unreadable)) is not None:
                yield record


def read_keys(path: Path, *, where: str) -> Iterator[TrajectoryKey]:
    """Read only the keys of a file's rows, possibly including invalid rows.

    Args:
        where: Name of the file for errors.

    Raises:
        RecordError: It is not a Parquet file, or not one of trajectories.
    """
    for batch in _batches(path, where, ["task_index", "rollout_index"]):
        for row in batch.to_pylist():
            if None not in row.values():
                yield TrajectoryKey(**row)


def read_rows(
    file: BinaryIO,
    *,
    where: str,
    wanted: Callable[[TrajectoryKey], bool],
    unreadable: Callable[[RecordError], None],
) -> Iterator[TrajectoryRecord]:
    """Read some rows of an open file, in order; of row groups without any of them only the keys are read.

    Args:
        where: Name of the file for errors.
        wanted: A predicate for keys, asked before the rows of a row group are read: True to read the row.
        unreadable: As in `read_parquet`.

    Raises:
        RecordError: It is not a Parquet file, or not one of trajectories.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        opened = pq.ParquetFile(file)
        _check_schema(opened, where)
        for group in range(opened.num_row_groups):
            keys = opened.read_row_group(group, columns=["task_index", "rollout_index"]).to_pylist()
            places = [place for place, row in enumerate(keys) if None in row.values() or wanted(TrajectoryKey(**row))]
            if places:
                for place, row in zip(places, opened.read_row_group(group).take(places).to_pylist(), strict=True):
                    if (record := _readable(row, f"{where}: row {number + place + 1}", unreadable)) is not None:
                        yield record
            number += len(keys)
    except pa.ArrowException as error:
        raise RecordError(f"{where}: not a Parquet file: {error}") from error


def _readable(row: dict[str, Any], where: str, unreadable: Callable[[RecordError], None]) -> TrajectoryRecord | None:
    try:
        return _record(row)
    except (LookupError, TypeError, ValueError) as error:
        unreadable(RecordError(f"{where}: not a TrajectoryRecord: {error}"))
        return None


def _check_schema(file: pyarrow.parquet.ParquetFile, where: str) -> None:
    if file.schema_arrow not in _known_schemas():
        missing = sorted(set(schema().names) - set(file.schema_arrow.names))
        raise RecordError(f"{where}: not a file of trajectories; missing or other columns: {', '.join(missing)}")


def _batches(path: Path, where: str, columns: list[str] | None) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_schema(file, where)
            yield from file.iter_batches(batch_size=_ROWS, columns=columns)
    except pa.ArrowException as error:
        raise RecordError(f"{where}: not a Parquet file: {error}") from error


def _row(record: TrajectoryRecord) -> dict[str, Any]:
    return {
        **{name: getattr(record, name) for name in schema().names if name not in _NAMED},
        "idx": orjson.dumps(record.idx).decode(),
        "metadata": orjson.dumps(record.metadata).decode(),
        "tools": None if record.tools is None else orjson.dumps(record.tools).decode(),
        "branches": None if record.branches is None else encode_branches(record.branches).decode(),
        "continuity": None if record.continuity is None else orjson.dumps(record.continuity).decode(),
        "sampling": None if record.sampling is None else orjson.dumps(record.sampling).decode(),
        "incidents": None if record.incidents is None else orjson.dumps(record.incidents).decode(),
        "messages": [_message_row(message) for message in record.messages],
        "tokens": {name: getattr(record.tokens, name) for name in ("prompt", "generated", "environment")},
        "timing": {name: getattr(record.timing, name) for name in _TIMES},
        "reward_parts": [{"name": name, "values": values} for name, values in record.reward_parts.items()],
    }


def _message_row(message: Message) -> dict[str, Any]:
    spans = message.policy_versions
    return {
        "role": message.role,
        "content": message.content,
        "token_ids": message.token_ids,
        "logprobs": message.logprobs,
        "turn": message.turn,
        "policy_versions": None
        if spans is None
        else [{"version": version, "start": start, "end": end} for version, start, end in spans],
        "truncated": message.truncated,
        "fields": orjson.dumps(message.fields).decode() if isinstance(message, ExtendedMessage) else None,
        "sampled": message.sampled,
    }


def _record(row: dict[str, Any]) -> TrajectoryRecord:
    missing = [name for name, value in row.items() if value is None and name not in _NULLABLE]
    if missing:
        raise ValueError(f"{missing[0]} is null")
    messages = [_message(message) for message in row["messages"]]
    check_authorship(messages, written=all("sampled" in message for message in row["messages"]))
    return TrajectoryRecord(
        **{
            **row,
            "idx": orjson.loads(row["idx"]),
            "metadata": orjson.loads(row["metadata"]),
            "tools": None if row.get("tools") is None else orjson.loads(row["tools"]),
            "branches": None if row.get("branches") is None else decode_branches(row["branches"]),
            "continuity": None if row.get("continuity") is None else orjson.loads(row["continuity"]),
            "sampling": None if row.get("sampling") is None else orjson.loads(row["sampling"]),
            "incidents": None if row.get("incidents") is None else _incidents(row["incidents"]),
            "messages": messages,
            "tokens": TokenCounts(**row["tokens"]),
            "timing": Timing(**row["timing"]),
            "reward_parts": {part["name"]: part["values"] for part in row["reward_parts"]},
        }
    )


def _incidents(text: str) -> list[Incident]:
    return msgspec.json.decode(text, type=list[Incident])


def _message(row: dict[str, Any]) -> Message:
    spans = row["policy_versions"]
    more = row.get("fields")
    chat = {"role": row["role"], "content": row["content"], **({} if more is None else orjson.loads(more))}
    message = message_of(chat, token_array(row["token_ids"]), turn=row["turn"], truncated=row["truncated"])
    message.logprobs = None if row["logprobs"] is None else array(LOGPROB_TYPE, row["logprobs"])
    message.policy_versions = (
        None if spans is None else [(span["version"], span["start"], span["end"]) for span in spans]
    )
    message.sampled = bool(row.get("sampled"))
    return message
