"""Rows from every source, and every way in which a row can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.rolloutjob import Dataset
from kuberoll_workers.collection.dataset import DatasetError, Row, read_rows
from kuberoll_workers.collection.expansion import expand, shard_of


def dataset(source: dict[str, Any], **fields: Any) -> Dataset:
    return Dataset.model_validate({"source": source, **fields})


class Generator:
    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"messages": [{"role": "user", "content": f"{seed}-{number}"}]} for number in range(count)]


def rows(given: Dataset, base: Path = Path(), names: tuple[str, ...] = ("a", "b")) -> list[Row]:
    return list(read_rows(given, base=base, task_names=names, environment=lambda name: Generator()))  # type: ignore[arg-type,return-value]


def write(path: Path, *lines: str | bytes) -> Dataset:
    data = b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines)
    (path / "rows.jsonl").write_bytes(data)
    return dataset({"uri": "rows.jsonl"})


def test_file_rows_know_their_lines(tmp_path: Path) -> None:
    given = write(
        tmp_path, '{"prompt": "one", "task_name": "a"}', "", '{"prompt": "three", "task_name": "b", "idx": 9}'
    )
    first, third = rows(given, tmp_path)
    assert first.where == f"{tmp_path / 'rows.jsonl'}:1"
    assert third.where.endswith("rows.jsonl:3")
    assert (third.task_name, third.idx, third.messages) == ("b", 9, [{"role": "user", "content": "three"}])


def test_byte_order_mark_crlf_and_a_missing_last_newline_are_tolerated(tmp_path: Path) -> None:
    given = write(tmp_path, b'\xef\xbb\xbf{"prompt": "x", "task_name": "a"}\r\n', b'{"prompt": "x", "task_name": "a"}')
    first, second = rows(given, tmp_path)
    assert first.content == second.content


def test_limit(tmp_path: Path) -> None:
    given = write(tmp_path, '{"prompt": "x", "task_name": "a"}', "this line is never read")
    assert len(rows(given.model_copy(update={"limit": 1}), tmp_path)) == 1


def test_generated_rows_come_from_each_environment_in_order() -> None:
    made = rows(dataset({"generator": {"count": 2, "seed": 5}}))
    assert [(row.task_name, row.messages[0]["content"]) for row in made] == [
        ("a", "5-0"), ("a", "5-1"), ("b", "5-0"), ("b", "5-1"),
    ]  # fmt: skip


def test_template_fills_fields() -> None:
    given = dataset(
        {"rows": [{"question": "2+2", "task_name": "a"}]},
        promptTemplate={"system": "Be {{brief}}.", "user": "Q: {question}"},
    )
    (row,) = rows(given)
    assert [m["content"] for m in row.messages] == ["Be {brief}.", "Q: 2+2"]


def test_the_only_environment_needs_no_task_name() -> None:
    (row,) = rows(dataset({"rows": [{"prompt": "x"}]}), names=("a",))
    assert row.task_name == "a"


def test_sampling_takes_both_spellings() -> None:
    (row,) = rows(dataset({"rows": [{"prompt": "x", "sampling": {"maxTokens": 5, "top_p": 0.5}}]}), names=("a",))
    assert row.sampling == {"max_tokens": 5, "top_p": 0.5}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "a row is a JSON object"),
        ({"prompt": "x"}, "task_name is missing"),
        ({"prompt": "x", "task_name": "chess"}, "found 'chess'; the job's environments are a, b"),
        ({"task_name": "a"}, "neither messages nor prompt"),
        ({"task_name": "a", "prompt": "x", "messages": []}, "exclude each other"),
        ({"task_name": "a", "messages": []}, "at least one message"),
        ({"task_name": "a", "messages": [{"role": "user"}]}, "messages[0]"),
        ({"task_name": "a", "prompt": "x", "metadata": 3}, "metadata: found a number 3"),
        ({"task_name": "a", "prompt": "x", "stop_strings": "</a>"}, "stop_strings: found text"),
        ({"task_name": "a", "prompt": "x", "sampling": {"temprature": 1}}, "sampling.temprature: unknown"),
        ({"task_name": "a", "prompt": "x", "sampling": {"temperature": -1}}, "sampling: "),
        ({"task_name": "a", "prompt": "x", "sampling": {"seed": 1}}, "sampling.seed: unknown"),
    ],
)
def test_unusable_rows_name_the_row_and_the_field(row: Any, message: str, tmp_path: Path) -> None:
    given = write(tmp_path, '{"prompt": "fine", "task_name": "a"}', json.dumps(row))
    with pytest.raises(DatasetError) as caught:
        rows(given, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'rows.jsonl'}:2: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [(b"{not json}\n", "not a JSON object"), (b'{"prompt": "\xff"}\n', "not a JSON object")],
)
def test_unreadable_lines(line: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=rf"rows\.jsonl:1: {message}"):
        rows(write(tmp_path, line), tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"uri": "missing.jsonl"}, "No such file"),
        ({"uri": "s3://bucket/rows.jsonl"}, "not s3://"),
        ({"configMap": {"name": "rows"}}, "only be read in a cluster"),
    ],
)
def test_unreadable_sources(source: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=message):
        rows(dataset(source), tmp_path)


def test_missing_template_field() -> None:
    given = dataset({"rows": [{"task_name": "a"}]}, promptTemplate={"user": "{question}"})
    with pytest.raises(DatasetError, match=r"uses \{question\}, which this row does not have"):
        rows(given)


def test_duplicates_are_one_task_and_continue_its_rollouts() -> None:
    raw = [{"prompt": "x"}, {"prompt": "y"}, {"prompt": "x"}]
    groups = list(expand(rows(dataset({"rows": raw}), names=("a",)), {"a": 2}))
    assert [(group.task_index, list(group.rollout_indexes)) for group in groups] == [
        (0, [0, 1]),
        (1, [0, 1]),
        (0, [2, 3]),
    ]


def test_key_order_does_not_make_another_task() -> None:
    raw: list[dict[str, Any]] = [{"prompt": "x", "idx": 1}, {"idx": 1, "prompt": "x"}]
    assert [group.task_index for group in expand(rows(dataset({"rows": raw}), names=("a",)), {"a": 1})] == [0, 0]


def test_shards_partition_the_tasks() -> None:
    shards = [shard_of(task, 3) for task in range(10)]
    assert sorted(set(shards)) == [0, 1, 2]
    assert max(map(shards.count, shards)) - min(map(shards.count, shards)) <= 1
