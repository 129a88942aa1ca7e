"""The columns of a shard's Parquet file, as others read them."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from kuberoll_workers.data.record import RecordError, encode_line
from kuberoll_workers.output import parquet
from kuberoll_workers.output.parquet import read_keys, read_parquet, write_parquet
from tests.output.support import record


def test_the_columns_are_those_that_others_read(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.parquet"
    parts = {"format": [0.5], "right": [1.0]}
    given = record(3, 1, reward_parts=parts, answer="42", group_reward=0.5)
    write_parquet(path, iter([given]))
    (row,) = pyarrow.parquet.read_table(path).to_pylist()
    assert set(row) == {
        "task_index", "rollout_index", "task_name", "idx", "messages", "total_reward", "rewards", "stop_reason",
        "turn_count", "tokens", "timing", "metadata", "seed", "attempt", "reward_parts", "answer", "token_source",
        "group_reward", "tools", "branches", "continuity", "group_order", "sampling", "incidents",
    }  # fmt: skip
    assert (row["task_index"], row["rollout_index"], row["task_name"]) == (3, 1, "env")
    assert (row["total_reward"], row["rewards"], row["stop_reason"], row["turn_count"]) == (1.0, [1.0], "terminated", 1)
    assert row["tokens"] == {"prompt": 2, "generated": 2, "environment": 0}
    assert row["timing"] == {"generation_seconds": [0.5], "environment_seconds": [0.25], "ended_at": []}
    assert [(part["name"], part["values"]) for part in row["reward_parts"]] == list(parts.items())
    assert (row["answer"], row["seed"], row["attempt"], row["token_source"]) == ("42", 2**63 - 1, 0, "engine")
    assert row["group_reward"] == 0.5
    assert row["tools"] is row["branches"] is row["continuity"] is row["group_order"] is row["sampling"] is None
    user, assistant = row["messages"]
    assert user["fields"] is None
    assert (user["role"], user["content"], user["token_ids"], user["logprobs"]) == ("user", "hi", [1, 2], None)
    assert (assistant["role"], assistant["content"], assistant["turn"]) == ("assistant", "é", 1)
    assert (assistant["token_ids"], len(assistant["logprobs"]), assistant["truncated"]) == ([3, 4], 2, False)
    assert assistant["policy_versions"] == [{"version": "v1", "start": 0, "end": 2}]
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(0)
    assert {group.column(number).compression for number in range(group.num_columns)} == {"ZSTD"}
    unreadable: list[RecordError] = []
    (read,) = read_parquet(path, where="x", unreadable=unreadable.append)
    assert unreadable == []
    assert encode_line(read) == encode_line(given)


@pytest.mark.parametrize(
    "lacking",
    [
        (),
        ("group_order",),
        ("group_order", "branches"),
        ("group_order", "branches", "tools"),
        ("group_order", "branches", "tools", "group_reward"),
        ("group_order", "branches", "tools", "group_reward", "ended_at"),
        ("group_order", "branches", "tools", "group_reward", "ended_at", "token_source"),
    ],
)
def test_files_of_earlier_versions_are_read(tmp_path: Path, lacking: tuple[str, ...]) -> None:
    path = tmp_path / "shard-00000.parquet"
    given = record(3, 1)
    given.timing.ended_at = [1_790_000_000.5]
    write_parquet(path, iter([given]))
    table = pyarrow.parquet.read_table(path)
    (whole,) = read_parquet(path, where="x", unreadable=_none)
    assert whole.timing.ended_at == [1_790_000_000.5]
    times = pyarrow.struct(
        [(name, pyarrow.list_(pyarrow.float64())) for name in ("generation_seconds", "environment_seconds")]
    )
    schema, rows = without_parts(table.schema, "sampled"), table.to_pylist()
    for name in (
        "incidents",
        "sampling",
        *(("group_order",) if "group_order" in lacking else ()),
        *(("branches", "continuity") if "branches" in lacking else ()),
    ):
        schema = schema.remove(schema.get_field_index(name))
    if "tools" in lacking:
        schema = without_parts(schema, "fields")
        schema = schema.remove(schema.get_field_index("tools"))
    if "group_reward" in lacking:
        schema = schema.remove(schema.get_field_index("group_reward"))
    if "ended_at" in lacking:
        schema = schema.set(schema.get_field_index("timing"), pyarrow.field("timing", times))
        del rows[0]["timing"]["ended_at"]
    if "token_source" in lacking:
        schema = schema.remove(schema.get_field_index("token_source"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)
    (read,) = read_parquet(path, where="x", unreadable=_none)
    assert read.timing.ended_at == ([] if "ended_at" in lacking else given.timing.ended_at)
    assert (read.token_source, read.tools) == ("engine", None)
    assert read.group_reward == (None if "group_reward" in lacking else given.group_reward)
    assert read.timing.generation_seconds == given.timing.generation_seconds
    assert [message.sampled for message in read.messages] == [False, True]


def without_parts(schema: pyarrow.Schema, *names: str) -> pyarrow.Schema:
    """The schema with messages that lack some parts."""
    parts = [part for part in schema.field("messages").type.value_type if part.name not in names]
    field = pyarrow.field("messages", pyarrow.list_(pyarrow.struct(parts)))
    return schema.set(schema.get_field_index("messages"), field)


def _none(error: RecordError) -> None:
    raise AssertionError(error)


def rows_changed(path: Path, change: Any) -> None:
    """Write the file again, its rows changed in place."""
    table = pyarrow.parquet.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), path)


def test_a_row_that_is_no_trajectory_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.parquet"
    assert write_parquet(path, (record(task) for task in range(5))) == 5

    def change(rows: list[dict[str, Any]]) -> None:
        rows[1]["metadata"] = "{"
        rows[2]["task_name"] = None
        rows[3]["task_index"] = rows[3]["token_source"] = None

    rows_changed(path, change)
    unreadable: list[RecordError] = []
    assert [found.task_index for found in read_parquet(path, where="the shard", unreadable=unreadable.append)] == [0, 4]
    second, third, fourth = map(str, unreadable)
    assert second.startswith("the shard: row 2: not a TrajectoryRecord: ")
    assert third == "the shard: row 3: not a TrajectoryRecord: task_name is null"
    assert fourth.startswith("the shard: row 4: not a TrajectoryRecord: ")
    # A trajectory that cannot be read was there all the same.
    assert [key.task_index for key in read_keys(path, where="the shard")] == [0, 1, 2, 4]


def test_values_that_may_be_absent_are_none(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.parquet"
    given = record(0, answer=None, idx=None, metadata=None)
    given.messages[1].policy_versions = given.messages[1].logprobs = None
    write_parquet(path, [given])
    (read,) = read_parquet(path, where="x", unreadable=_none)
    assert encode_line(read) == encode_line(given)
    assert (read.answer, read.messages[1].policy_versions, read.messages[1].logprobs) == (None, None, None)


def test_files_of_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.parquet"
    write_parquet(path, [record(0)])
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.drop_columns(["seed", "rewards"]), path)
    with pytest.raises(RecordError, match=r"the shard: not a file of trajectories; .* columns: rewards, seed$"):
        list(read_parquet(path, where="the shard", unreadable=_none))
    path.write_text("no Parquet")
    with pytest.raises(RecordError, match="the shard: not a Parquet file"):
        list(read_keys(path, where="the shard"))


@pytest.mark.parametrize(
    ("rows", "tokens", "groups"), [(3, 10**6, [3, 3, 1]), (100, 8, [2, 2, 2, 1]), (7, 10**6, [7]), (100, 1, [1] * 7)]
)
def test_row_groups_are_bounded_by_rows_and_by_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int, groups: list[int]
) -> None:
    monkeypatch.setattr(parquet, "_ROWS", rows)
    monkeypatch.setattr(parquet, "_GROUP_TOKENS", tokens)
    path = tmp_path / "shard-00000.parquet"
    assert write_parquet(path, (record(task) for task in range(7))) == 7
    metadata = pyarrow.parquet.ParquetFile(path).metadata
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == groups
    read = list(read_parquet(path, where="x", unreadable=_none))
    assert [found.task_index for found in read] == list(range(7))
    assert all(isinstance(found.messages[1].logprobs, array) for found in read)
