"""Rows as prompt and completion."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from kuberoll.trainer import Batch, Rollouts
from kuberoll.trainer.adapters.rows import BatchUnfit, common_temperature, require_sampling, rows_of
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import AnyRecord
from tests.trainer.support import PLAIN, WrittenRun, trajectory


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


OTHERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.3},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 40},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "structured_outputs": {"structured_outputs": "json"},
    "constraints": {"constraints": ["logit_bias"]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_response_of_another_distribution_is_refused_by_name(tmp_path: Path, name: str) -> None:
    other = trajectory(1, 0, sampling=[None, {**PLAIN, **OTHERS[name]}])
    batch = batch_of(tmp_path, trajectory(0), other)
    assert batch.sampling == ((PLAIN,), (PLAIN, {**PLAIN, **OTHERS[name]}))
    assert [part.sampling for part in batch.minibatches(max_tokens=6)] == [(row,) for row in batch.sampling]
    for check in (lambda: require_sampling(batch, temperature=1.0), lambda: common_temperature(batch)):
        with pytest.raises(BatchUnfit, match=rf"^task 1, rollout 0 was sampled with {name}: "):
            check()
    with pytest.raises(BatchUnfit, match=r"^task 0, rollout 0 was sampled with temperature: 1"):
        require_sampling(batch, temperature=0.3)


def test_a_batch_of_one_temperature_says_it(tmp_path: Path) -> None:
    colder = trajectory(0, sampling=[{**PLAIN, "temperature": 0.5}] * 2)
    assert common_temperature(batch_of(tmp_path, colder)) == 0.5


def test_sampling_that_no_manifest_says_is_refused(tmp_path: Path) -> None:
    written = WrittenRun(tmp_path / "run", groups=1, repeats=1)
    del written.manifest["sampling"]
    (written.path / "manifest.json").write_text(json.dumps(written.manifest))
    written.write(trajectory(0))
    written.end()
    (batch,) = Rollouts.open(str(written.path)).batches(1)
    with pytest.raises(BatchUnfit, match="sampling: unknown"):
        require_sampling(batch, temperature=1.0)


@pytest.mark.parametrize("version", ["step-4", "07"])
def test_versions_that_are_names_are_refused(tmp_path: Path, version: str) -> None:
    messages = [
        Message("user", "p", token_array([1])),
        Message("assistant", "a", token_array([2]), array("f", [-1.0]), 1, [(version, 0, 1)], sampled=True),
    ]
    with pytest.raises(BatchUnfit, match=f"'{version}' of the weights is not a whole number"):
        list(rows_of(batch_of(tmp_path, trajectory(0, messages=messages))))
