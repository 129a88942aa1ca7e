"""Lines say who sampled each message; lines of older versions are read right, and contradictions are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import (
    Branch,
    RecordError,
    Timing,
    TrajectoryRecord,
    TurnRecord,
    decode_branches,
    decode_line,
    encode_branches,
    encode_line,
)
from kuberoll_workers.output.parquet import read_parquet, write_parquet
from tests.output.support import record, turn


def _played() -> TrajectoryRecord:
    """Two turns, after each of which the environment says something as an assistant; and a branch."""
    messages = [
        Message("assistant", "example", token_array([1])),
        Message("user", "hi", token_array([2])),
        Message("assistant", "é", token_array([3]), [-0.5], 1, [("0", 0, 1)], sampled=True),
        Message("assistant", "opponent", token_array([4]), turn=1),
        # Without log-probabilities, of a server that returns none.
        Message("assistant", "f", token_array([5]), turn=2, sampled=True),
        Message("assistant", "opponent", token_array([6]), turn=2),
    ]
    branch = Branch(messages[:3], [2], Timing([0.5], [0.25], [1.0]))
    return record(3, messages=messages, branches=[branch])


def _marks(messages: list[Message]) -> list[bool]:
    return [message.sampled for message in messages]


def _older(line: bytes) -> dict[str, Any]:
    """A line as versions wrote it that did not say who sampled a message."""
    row: dict[str, Any] = orjson.loads(line)
    for messages in (row["messages"], *(branch["messages"] for branch in row.get("branches") or ())):
        for message in messages:
            del message["sampled"]
    return row


MARKS = [False, False, True, False, True, False]


def test_a_line_says_who_sampled() -> None:
    line = encode_line(_played())
    assert [message["sampled"] for message in orjson.loads(line)["messages"]] == MARKS
    read = decode_line(line, TrajectoryRecord, where="x")
    assert (_marks(read.messages), _marks((read.branches or [])[0].messages)) == (MARKS, MARKS[:3])


def test_a_line_of_an_older_version_is_read_right() -> None:
    read = decode_line(orjson.dumps(_older(encode_line(_played()))), TrajectoryRecord, where="x")
    assert (_marks(read.messages), _marks((read.branches or [])[0].messages)) == (MARKS, MARKS[:3])
    assert encode_line(read) == encode_line(_played())
    journaled = decode_line(orjson.dumps(_older(encode_line(turn(0)))), TurnRecord, where="x")
    assert _marks(journaled.messages) == [True, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row["messages"][4].update(sampled=False), r"messages\[4\], of turn 2 .* is not marked"),
        (lambda row: row["messages"][3].update(sampled=True), r"messages\[3\], of turn 1 .* is marked"),
        (lambda row: row["messages"][0].update(sampled=True), r"messages\[0\], of turn 0 .* is marked"),
        (lambda row: row["messages"][3].update(logprobs=[-1.0]), r"messages\[3\], .* and has logprobs"),
        (lambda row: row["branches"][0]["messages"][2].update(sampled=False), r"branches\[0\]\.messages\[2\]"),
        # In a line of an older version: where a turn begins with somebody else's message.
        (lambda row: [row.update(_older(orjson.dumps(row))), row["messages"][4].update(role="user")], r"messages\[4\]"),
    ],
)
def test_a_line_that_contradicts_itself_is_refused(change: Any, words: str) -> None:
    row = orjson.loads(encode_line(_played()))
    change(row)
    with pytest.raises(RecordError, match=f"^x: not a TrajectoryRecord: {words}"):
        decode_line(orjson.dumps(row), TrajectoryRecord, where="x")


def test_metadata_that_names_the_field_does_not_make_an_older_line_a_new_one() -> None:
    row = {**_older(encode_line(_played())), "metadata": {"sampled": 1}}
    with pytest.raises(RecordError, match=r"messages\[2\], of turn 1 .* is not marked"):
        decode_line(orjson.dumps(row), TrajectoryRecord, where="x")


def test_parquet_says_it_too(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.parquet"
    write_parquet(path, [_played()])
    (read,) = read_parquet(path, where="x", unreadable=lambda error: pytest.fail(str(error)))
    assert (_marks(read.messages), _marks((read.branches or [])[0].messages)) == (MARKS, MARKS[:3])
    branches = decode_branches(encode_branches(_played().branches or []))
    assert _marks(branches[0].messages) == MARKS[:3]


def test_branches_of_a_column_are_read_as_those_of_a_line() -> None:
    text = encode_branches(_played().branches or [])
    older = orjson.loads(text)
    for message in older[0]["messages"]:
        del message["sampled"]
    assert _marks(decode_branches(orjson.dumps(older))[0].messages) == MARKS[:3]
    contradiction = orjson.loads(text)
    contradiction[0]["messages"][2]["sampled"] = False
    with pytest.raises(ValueError, match=r"^branches\[0\]\.messages\[2\], of turn 1"):
        decode_branches(orjson.dumps(contradiction))
