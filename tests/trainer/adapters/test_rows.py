"""Rows as prompt and completion."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from kuberoll.trainer import Batch, Rollouts
from kuberoll.trainer.adapters.rows import BatchUnfit, rows_of
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import AnyRecord
from tests.trainer.support import WrittenRun, trajectory


def batch_of(path: Path, *records: AnyRecord) -> Batch:
    written = WrittenRun(path / "run", groups=len(records), repeats=1)
    written.write(*records)
    written.end()
    (batch,) = Rollouts.open(str(written.path)).batches(len(records))
    return batch


def test_a_row_is_divided_before_its_first_sampled_token(tmp_path: Path) -> None:
    (row,) = rows_of(batch_of(tmp_path, trajectory(7)))
    assert row.prompt_ids.tolist() == [1, 7]
    assert row.completion_ids.tolist() == [2, 0, 5, 6]
    assert row.sampled.tolist() == [True, True, False, True]
    assert row.logprobs.tolist() == [-0.5, -0.25, 0.0, -1.0]
    assert row.oldest_version == 3


def test_a_row_without_sampled_tokens_has_a_completion_that_teaches_nothing(tmp_path: Path) -> None:
    messages = [
        Message("user", "p", token_array([1, 2])),
        Message("assistant", "", token_array([]), array("f"), 1, [], sampled=True),
    ]
    (row,) = rows_of(batch_of(tmp_path, trajectory(0, messages=messages)))
    assert (row.prompt_ids.tolist(), row.completion_ids.tolist()) == ([1], [2])
    assert row.sampled.tolist() == [False]
    assert row.oldest_version == -1


@pytest.mark.parametrize("version", ["step-4", "07"])
def test_versions_that_are_names_are_refused(tmp_path: Path, version: str) -> None:
    messages = [
        Message("user", "p", token_array([1])),
        Message("assistant", "a", token_array([2]), array("f", [-1.0]), 1, [(version, 0, 1)], sampled=True),
    ]
    with pytest.raises(BatchUnfit, match=f"'{version}' of the weights is not a whole number"):
        list(rows_of(batch_of(tmp_path, trajectory(0, messages=messages))))
