"""Shuffled rows, and mixtures of several sources."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kuberoll_api.model.dataset import Dataset
from kuberoll_workers.data.shards import shard_of
from kuberoll_workers.dataset.expansion import expand
from kuberoll_workers.dataset.order import NumberedRow, mixed, shuffled, shuffled_order
from kuberoll_workers.dataset.reading import DatasetError, Row, read_rows
from kuberoll_workers.dataset.rows import RowPosition


def read(base: Path = Path(), **fields: Any) -> list[Row]:
    given_dataset = Dataset.model_validate(fields)

    class Generator:
        def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
            return [{"prompt": f"{seed}-{number}"} for number in range(count)]

    return list(
        read_rows(given_dataset, base=base, task_names=("math", "chat"), environment=lambda _: Generator())  # type: ignore[arg-type, return-value]
    )


def plain(count: int, letter: str = "p", **fields: Any) -> dict[str, Any]:
    return {"rows": [{"prompt": f"{letter}{number}", "task_name": "math", **fields} for number in range(count)]}


def prompts(rows: list[Row]) -> list[str]:
    return [row.messages[0]["content"] for row in rows]


@given(st.integers(0, 500), st.integers(0, 2**63 - 1))
def test_an_order_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(shuffled_order(count, seed)) == list(range(count))


def test_the_order_of_a_seed_is_for_ever() -> None:
    # A run that was begun with another version of KubeRoll, Python or NumPy is resumed in this order.
    assert shuffled_order(12, 7).tolist() == ORDER_OF_7


def test_all_orders_are_about_equally_likely() -> None:
    counts = Counter(tuple(shuffled_order(4, seed).tolist()) for seed in range(24 * 200))
    assert len(counts) == 24
    # Chi-squared with 23 degrees of freedom: 49.7 is exceeded once in a thousand times, and these seeds are fixed.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 49.7


def test_shuffled_rows_keep_place_number_and_value_beyond_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kuberoll_workers.dataset.order._MEMORY_BYTES", 1000)
    rows = [
        NumberedRow(number % 3, number, RowPosition(f"{number % 3}:", number), {"é": [1.0, number, None]})
        for number in range(300)
    ]
    found = list(shuffled(rows, 5))
    assert found != rows
    assert sorted(found, key=lambda row: row.number) == rows


def test_a_row_that_cannot_be_kept_names_itself() -> None:
    with pytest.raises(DatasetError, match=r"rows\[0\]: the row cannot be written as JSON"):
        read(source={"rows": [{"prompt": "x", "metadata": {"a": "\ud800"}}]}, shuffleSeed=1)


def test_a_shuffle_is_another_order_of_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt":"{n}","task_name":"chat"}}\n' for n in range(50)))
    source = {"uri": "rows.jsonl"}
    one, again, other = (read(tmp_path, source=source, shuffleSeed=seed) for seed in (1, 1, 2))
    assert prompts(one) == prompts(again) != prompts(other)
    assert sorted(map(int, prompts(one))) == sorted(map(int, prompts(other))) == list(range(50))
    assert all(row.where == f"{tmp_path}/rows.jsonl:{int(row.messages[0]['content']) + 1}" for row in one)


def test_the_limit_is_of_the_shuffled_rows() -> None:
    whole = prompts(read(source=plain(50), shuffleSeed=3))
    assert prompts(read(source=plain(50), shuffleSeed=3, limit=7)) == whole[:7] != prompts(read(source=plain(7)))


@given(st.integers(1, 30), st.integers(0, 9), st.integers(1, 5))
def test_shards_divide_the_tasks_of_a_shuffle(rows: int, seed: int, shards: int) -> None:
    groups = list(expand(iter(read(source=plain(rows), shuffleSeed=seed)), {"math": 2}))
    assert [group.task_index for group in groups] == list(range(rows))
    of_shards = [[g.task_index for g in groups if shard_of(g.task_index, shards) == shard] for shard in range(shards)]
    assert sorted(itertools.chain.from_iterable(of_shards)) == list(range(rows))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(1, 300))
def test_shares_hold_in_every_part_of_a_mixture(weights: list[float], count: int) -> None:
    streams = [iter([index] * count) for index in range(len(weights))]
    taken = [0] * len(weights)
    for total, index in enumerate(mixed(streams, weights), start=1):
        taken[index] += 1
        for weight, number in zip(weights, taken, strict=True):
            assert abs(number - total * weight / sum(weights)) < len(weights)
    assert count in taken


def test_a_mixture_is_deterministic_and_ends_with_its_first_source() -> None:
    parts = [
        {"name": "a", "source": plain(3, "a"), "weight": 1},
        {"name": "b", "source": plain(100, "b"), "weight": 2},
    ]
    assert prompts(read(sources=parts)) == ["b0", "a0", "b1", "b2", "a1", "b3", "b4", "a2", "b5", "b6"]
    assert len(read(sources=parts, limit=4)) == 4


def test_without_weights_a_mixture_is_all_rows() -> None:
    parts = [{"name": "a", "source": plain(2, "a")}, {"name": "b", "source": plain(3, "b"), "limit": 2}]
    assert prompts(read(sources=parts)) == ["a0", "a1", "b0", "b1"]
    mixed_up = prompts(read(sources=parts, shuffleSeed=4))
    assert len(mixed_up) == 4
    assert {"a0", "a1"} < set(mixed_up)


def test_a_shuffled_mixture_keeps_its_shares() -> None:
    parts = [
        {"name": "a", "source": plain(40, "a"), "weight": 1},
        {"name": "b", "source": plain(40, "b"), "weight": 3},
    ]
    rows = prompts(read(sources=parts, shuffleSeed=1))
    for start in range(0, 52, 4):
        assert Counter(text[0] for text in rows[start : start + 4]) == {"a": 1, "b": 3}
    in_order = [text for text in rows if text[0] == "b"]
    assert in_order != sorted(in_order, key=lambda text: int(text[1:]))
    # Sources of one size do not have one order.
    assert [text[1:] for text in rows if text[0] == "a"] != [text[1:] for text in in_order][: len(rows) - len(in_order)]


def test_rows_of_a_mixture_have_the_name_of_their_source_and_an_idx_of_their_own() -> None:
    rows_of = {
        "a": [{"prompt": "x"}, {"prompt": "x"}],
        "b": [{"prompt": "x", "task_id": 7, "task_name": "math"}, {"prompt": "y", "idx": [1]}],
        "c": [{"q": "z", "task_id": 7}],
    }
    parts: list[dict[str, Any]] = [
        {"name": name, "source": {"rows": rows}, "environment": "chat"} for name, rows in rows_of.items()
    ]
    parts[2]["columns"] = {"prompt": "q"}
    for seed in (None, 1, 2):
        rows = {row.where: row for row in read(sources=parts, shuffleSeed=seed)}
        found = {
            where.removeprefix("spec.dataset.sources"): (row.idx, row.task_name, row.metadata)
            for where, row in rows.items()
        }
        assert found == {
            "[0].source.rows[0]": ("a/0", "chat", {"dataset_source": "a"}),
            "[0].source.rows[1]": ("a/1", "chat", {"dataset_source": "a"}),
            "[1].source.rows[0]": ("b/7", "math", {"dataset_source": "b"}),
            "[1].source.rows[1]": ("b/[1]", "chat", {"dataset_source": "b"}),
            "[2].source.rows[0]": ("c/7", "chat", {"dataset_source": "c"}),
        }
        tasks = {group.row.where: group.task_index for group in expand(iter(rows.values()), {"math": 1, "chat": 1})}
        # Equal rows of one source are one task; those of two sources are not, nor are equal ids.
        assert len(set(tasks.values())) == 4


def test_sources_of_all_kinds_are_mixed(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "2+2?", "answer": "4"}) + "\n")
    parts = [
        {"name": "file", "source": {"uri": "rows.jsonl"}, "environment": "math",
         "columns": {"metadata.ground_truth": "answer"}, "promptTemplate": {"user": "Q: {question}"}},
        {"name": "made", "source": {"generator": {"count": 2, "environments": ["chat"]}}},
    ]  # fmt: skip
    rows = read(tmp_path, sources=parts)
    assert [(row.idx, row.task_name) for row in rows] == [("file/0", "math"), ("made/0", "chat"), ("made/1", "chat")]
    assert rows[0].metadata == {"question": "2+2?", "ground_truth": "4", "dataset_source": "file"}


def test_single_sources_are_as_they_were() -> None:
    [row] = read(source={"rows": [{"prompt": "x", "task_name": "math"}]})
    assert (row.content, row.metadata, row.idx) == (b'{"prompt":"x","task_name":"math"}', None, None)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"name": "a", "source": {"rows": []}}], "spec.dataset.sources: a: there are no rows"),
        ([{"name": "a", "source": {"uri": "nowhere.jsonl"}}], "spec.dataset.sources[0].source.uri: /"),
        (
            [{"name": "a", "source": {"configMap": {"name": "b"}}}],
            "spec.dataset.sources[0].source.configMap can only be read in a cluster; on this machine name a file "
            "beside the manifest: --set spec.dataset.sources[0].source='{uri: rows.jsonl}'",
        ),
        (
            [{"name": "a", "source": plain(1, metadata={"dataset_source": "b"})}],
            'spec.dataset.sources[0].source.rows[0]: metadata.dataset_source: found text "b"; the name of',
        ),
        (
            [{"name": "a", "source": {"rows": [{"prompt": "x"}]}}],
            "spec.dataset.sources[0].source.rows[0]: task_name",
        ),
    ],
)
def test_sources_that_cannot_be_used(parts: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError) as caught:
        read(tmp_path, sources=parts)
    assert str(caught.value).startswith(message)


A: dict[str, Any] = {"name": "a", "source": {"uri": "a"}}
B: dict[str, Any] = {"name": "b", "source": {"uri": "b"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "set one of source and sources (a list of several); found neither"),
        ({"source": {"uri": "a"}, "sources": [A]}, "set one of source and sources (a list of several); found both"),
        ({"sources": [A, A]}, 'found "a", the name of sources[0] too'),
        ({"sources": [A | {"weight": 1}, B]}, "is missing, and other sources have one; give all sources a weight"),
        ({"sources": [A | {"weight": 0}]}, "Input should be greater than 0"),
        ({"sources": [A], "columns": {"prompt": "q"}}, "is for a single source; with sources it belongs to each"),
        ({"sources": [A], "promptTemplate": {"user": "q"}}, "is for a single source; with sources it belongs to each"),
        ({"sources": [A | {"columns": {"promt": "q"}}]}, "is not a field that KubeRoll reads"),
    ],
)
def test_sources_that_contradict(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Dataset.model_validate(fields)
    assert message in caught.value.errors()[0]["msg"]


ORDER_OF_7 = [1, 10, 8, 5, 7, 0, 9, 4, 6, 3, 2, 11]
