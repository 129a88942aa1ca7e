"""Rows with one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.certification.twins import MAX_TWINS, Twins
from kuberoll_workers.dataset.rows import Row


def row(number: int, prompt: str, truth: int) -> Row:
    place: Any = f"rows.jsonl:{number + 1}"
    return Row(
        place=place, content=b"", task_id=None, task_name="math", messages=[{"role": "user", "content": prompt}],
        metadata={"ground_truth": truth}, stop_strings=None, sampling={}, idx=number,
    )  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=40))
def test_twins_are_the_others_with_the_prompt_and_another_grading(rows: list[tuple[str, int]]) -> None:
    read = 0

    def dataset() -> Iterator[Row]:
        nonlocal read
        read += 1
        return (row(number, *one) for number, one in enumerate(rows))

    twins = Twins(dataset)
    assert read <= 2
    for number, (prompt, truth) in enumerate(rows):
        expected = [
            f"rows.jsonl:{place + 1}" for place, other in enumerate(rows) if other[0] == prompt and other[1] != truth
        ]
        found = twins.of(number, row(number, prompt, truth))
        assert [one.where for one in found] == expected[:MAX_TWINS]
