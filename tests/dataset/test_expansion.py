"""Tasks, rollouts and shards: who is whose sibling, and where each is run."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.record import TrajectoryKey
from kuberoll_workers.data.shards import shard_of, share
from kuberoll_workers.dataset.expansion import PromptGroup, expand, sample_groups, tokenize
from kuberoll_workers.dataset.rows import DatasetError, Row, RowPosition, parse_row
from kuberoll_workers.output.run_state import RunState


def rows(raw: Iterable[dict[str, Any]], names: tuple[str, ...] = ("a", "b")) -> list[Row]:
    return [
        parse_row({"task_name": "a", **row}, place=RowPosition("rows.jsonl:", number), task_names=names, template=None)
        for number, row in enumerate(raw, start=1)
    ]


def numbered(groups: Iterable[PromptGroup]) -> list[tuple[int, list[int]]]:
    return [(group.task_index, list(group.rollout_indexes)) for group in groups]


def test_all_samples_of_a_row_come_together() -> None:
    groups = expand(rows([{"prompt": "x"}, {"prompt": "y"}]), {"a": 3})
    assert numbered(groups) == [(0, [0, 1, 2]), (1, [0, 1, 2])]


def test_duplicates_are_one_task_and_continue_its_rollouts() -> None:
    groups = expand(rows([{"prompt": "x"}, {"prompt": "y"}, {"prompt": "x"}]), {"a": 2})
    assert numbered(groups) == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3])]


def test_oversampled_indexes_are_not_given_to_a_duplicate() -> None:
    groups = list(expand(rows([{"prompt": "x"}] * 2), {"a": 2}, oversample=1))
    assert numbered(groups) == [(0, [0, 1, 2]), (0, [3, 4, 5])]
    assert [group.keep for group in groups] == [2, 2]


def test_repeats_are_by_environment() -> None:
    groups = expand(rows([{"prompt": "x"}, {"prompt": "x", "task_name": "b"}]), {"a": 1, "b": 3})
    assert numbered(groups) == [(0, [0]), (1, [0, 1, 2])]


def test_rows_of_one_id_are_one_task() -> None:
    raw: list[dict[str, Any]] = [
        {"prompt": "x", "task_id": 1},
        {"prompt": "x", "task_id": "1"},
        {"prompt": "x"},
        {"prompt": "x", "task_id": 1},
    ]
    assert numbered(expand(rows(raw), {"a": 1})) == [(0, [0]), (1, [0]), (2, [0]), (0, [1])]


@pytest.mark.parametrize("field", ["task_id", "_ng_task_index"])
def test_an_id_of_rows_that_differ_names_both(field: str) -> None:
    form: dict[str, Any] = {"responses_create_params": {"input": "x"}} if field == "_ng_task_index" else {"prompt": "x"}
    raw = [
        {"prompt": "first"},
        {**form, field: 7, "idx": 1},
        {**form, field: 7, "idx": 1},
        {**form, field: 7, "idx": 2},
    ]
    groups = expand(rows(raw), {"a": 1})
    assert numbered(itertools.islice(groups, 3)) == [(0, [0]), (1, [0]), (1, [1])]
    with pytest.raises(DatasetError, match=r"^rows\.jsonl:4: task_id: 7 is already the task of rows\.jsonl:2,"):
        next(groups)


@given(
    tasks=st.lists(st.integers(0, 5), max_size=30),
    repeats=st.integers(1, 4),
    oversample=st.integers(0, 2),
    shards=st.integers(1, 9),
)
def test_numbering_and_sharding(tasks: list[int], repeats: int, oversample: int, shards: int) -> None:
    groups = list(expand(rows({"prompt": str(task)} for task in tasks), {"a": repeats}, oversample=oversample))
    number_of = {task: number for number, task in enumerate(dict.fromkeys(tasks))}
    assert [group.task_index for group in groups] == [number_of[task] for task in tasks]
    keys = [(group.task_index, index) for group in groups for index in group.rollout_indexes]
    assert len(set(keys)) == len(keys) == len(tasks) * (repeats + oversample)
    for task, count in Counter(tasks).items():
        of_task = [index for number, index in keys if number == number_of[task]]
        assert of_task == list(range(count * (repeats + oversample)))
    sizes = Counter(shard_of(number, shards) for number in number_of.values())
    assert all(0 <= shard < shards for shard in sizes)
    # As even as can be; with more shards than tasks, some have none.
    assert [sizes[shard] for shard in range(shards)] == [
        share(len(number_of), shard, shards) for shard in range(shards)
    ]


class Letters:
    def render_chat(self, messages: list[dict[str, Any]], *, tools: Any = None) -> Any:
        return token_array(map(ord, messages[0]["content"]))


@given(
    tasks=st.lists(st.integers(0, 9), max_size=30),
    shards=st.integers(1, 12),
    workers=st.integers(1, 5),
    stored=st.sets(st.tuples(st.integers(0, 9), st.integers(0, 5))),
)
def test_workers_divide_the_samples_among_them(
    tasks: list[int], shards: int, workers: int, stored: set[tuple[int, int]]
) -> None:
    done = RunState()
    for key in stored:
        done.stored.add(TrajectoryKey(*key))

    def run(mine: Iterable[int]) -> Iterator[tuple[int, tuple[int, int], int | None]]:
        given = sample_groups(
            expand(rows({"prompt": str(task)} for task in tasks), {"a": 2}),
            tokenizer=Letters(),  # type: ignore[arg-type]
            shards=list(mine),
            shard_count=shards,
            done=done,
            seed=5,
        )
        for group in given:
            for sample in group.samples:
                yield (
                    shard_of(sample.key.task_index, shards),
                    (sample.key.task_index, sample.rollout_index),
                    sample.seed,
                )

    alone = sorted(run(range(shards)))
    together = [list(run(range(worker, shards, workers))) for worker in range(workers)]
    # The same samples with the same seeds in the same shards, whoever runs them.
    assert sorted(itertools.chain.from_iterable(together)) == alone
    wanted = {
        (g.task_index, i) for g in expand(rows({"prompt": str(t)} for t in tasks), {"a": 2}) for i in g.rollout_indexes
    }
    assert {key for _, key, _ in alone} == wanted - stored
    assert len({seed for _, _, seed in alone}) == len(alone)


@pytest.mark.parametrize("base", [None, 5])
def test_a_row_s_seed_takes_the_place_of_the_job_s(base: int | None) -> None:
    def seeds(seed: int | None, raw: dict[str, Any]) -> list[int | None]:
        groups = sample_groups(
            expand(rows([raw]), {"a": 3}),
            tokenizer=Letters(),  # type: ignore[arg-type]
            shards=[0],
            shard_count=1,
            done=RunState(),
            seed=seed,
        )
        return [sample.seed for group in groups for sample in group.samples]

    own = seeds(base, {"prompt": "x", "sampling": {"seed": 9}})
    assert own == seeds(9, {"prompt": "x"}) != seeds(base, {"prompt": "x"})
    assert len(set(own)) == 3


@pytest.mark.slow
def test_a_resumed_run_has_what_is_left_of_each_group() -> None:
    raw = [{"prompt": str(task), "metadata": {"n": task}} for task in range(4)]
    done = RunState()
    done.stored.add(TrajectoryKey(0, 1))
    done.filtered.add(TrajectoryKey(1, 0))
    for index in (0, 2):
        done.stored.add(TrajectoryKey(2, index))
    done.attempts[TrajectoryKey(0, 2)] = 3
    groups = list(
        sample_groups(
            expand(rows(raw), {"a": 2}, oversample=1),
            tokenizer=Letters(),  # type: ignore[arg-type]
            shards=[0],
            shard_count=1,
            done=done,
            seed=None,
        )
    )
    # Task 1 was filtered out, task 2 has all that it keeps.
    assert [(group.samples[0].prompt.task_index, group.keep, group.decided) for group in groups] == [
        (0, 1, True),
        (3, 2, False),
    ]
    first, second = groups
    assert [(sample.rollout_index, sample.attempt, sample.seed) for sample in first.samples] == [
        # One attempt for both, by which a reader knows that the group goes on.
        (0, 3, None),
        (2, 3, None),
    ]
    assert [sample.rollout_index for sample in second.samples] == [0, 1, 2]
    prompt = second.samples[0].prompt
    assert (prompt.task_name, prompt.idx, prompt.metadata, prompt.stop_strings) == ("a", None, {"n": 3}, None)
    (message,) = prompt.messages
    assert (message.role, message.content, list(message.token_ids)) == ("user", "3", list(prompt.token_ids))


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_a_task_takes_less_than_200_bytes(named: bool) -> None:
    (row,) = rows([{"prompt": "x"}])
    count = 100_000

    def many() -> Iterator[Row]:
        for number in range(count):
            yield Row(
                place=RowPosition("rows.jsonl:", number),
                content=b"%d" % number,
                task_id=f"the task with the number {number}" if named else None,
                task_name="a", messages=row.messages, metadata=None, stop_strings=None, sampling={}, idx=None,
            )  # fmt: skip

    groups = expand(many(), {"a": 8})
    tracemalloc.start()
    try:
        assert sum(len(group.rollout_indexes) for group in groups) == 8 * count
        assert tracemalloc.get_traced_memory()[1] < 200 * count
    finally:
        tracemalloc.stop()


def test_messages_that_a_chat_template_refuses_name_their_row() -> None:
    class Refusing:
        def render_chat(self, messages: Any, *, tools: Any = None) -> Any:
            raise TypeError("roles must alternate")

    (group,) = expand(rows([{"prompt": "x"}], ("a",)), {"a": 1})
    tokenizer: Any = Refusing()
    with pytest.raises(DatasetError, match=r"the model's chat template rejects these messages: roles must alternate"):
        tokenize(group, tokenizer)
