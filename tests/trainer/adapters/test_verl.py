"""Batches in verl's form, and verl's own classes and functions on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kuberoll.trainer import Batch, Rollouts
from kuberoll.trainer.adapters.rows import BatchUnfit
from kuberoll.trainer.adapters.verl import agent_loop_outputs, to_data_proto_tensors
from tests.trainer.support import WrittenRun, trajectory

TRAINERS = os.environ.get("KUBEROLL_TEST_TRAINERS", "")
GROUPS, REPEATS = 3, 4


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    run = WrittenRun(tmp_path / "run", groups=GROUPS, repeats=REPEATS)
    for task in range(GROUPS):
        run.write(*[trajectory(task, rollout, reward=0.25 * rollout) for rollout in range(REPEATS)])
    run.end()
    return run


@pytest.fixture
def batch(written: WrittenRun) -> Batch:
    (found,) = Rollouts.open(str(written.path)).batches(GROUPS)
    return found


def test_the_parts_of_a_data_proto(batch: Batch) -> None:
    parts = to_data_proto_tensors(batch, prompt_length=4, response_length=5, pad_id=9)
    row = {name: tensor[6].tolist() for name, tensor in parts["tensors"].items()}
    assert (batch.task_index[6], batch.rollout_index[6]) == (1, 2)
    assert row == {
        "prompts": [9, 9, 1, 1],
        "responses": [2, 2, 5, 6, 9],
        "response_mask": [1, 1, 0, 1, 0],
        "input_ids": [9, 9, 1, 1, 2, 2, 5, 6, 9],
        "attention_mask": [0, 0, 1, 1, 1, 1, 1, 1, 0],
        "position_ids": [0, 0, 0, 1, 2, 3, 4, 5, 5],
        "rollout_log_probs": [-0.5, -0.25, 0.0, -1.0, 0.0],
        "rm_scores": [0.0, 0.0, 0.0, 0.5, 0.0],
    }
    others = {name: array[6] for name, array in parts["non_tensors"].items()}
    assert others == {
        "uid": "1-0", "__num_turns__": 4, "data_source": "env", "task_index": 1, "rollout_index": 2,
        "policy_version": 3,
    }  # fmt: skip


def test_without_lengths_rows_are_as_long_as_the_longest(batch: Batch) -> None:
    tensors = to_data_proto_tensors(batch)["tensors"]
    assert tensors["prompts"].shape == (GROUPS * REPEATS, 2)
    assert tensors["responses"].shape == (GROUPS * REPEATS, 4)


def test_rows_that_are_too_long_are_named(batch: Batch) -> None:
    with pytest.raises(BatchUnfit, match="task 0, rollout 0: its response has 4 tokens, and response_length is 3"):
        to_data_proto_tensors(batch, response_length=3)


def test_the_fields_of_an_agent_loop_s_output(batch: Batch) -> None:
    fields = agent_loop_outputs(batch)[6]
    assert fields["prompt_ids"] == [1, 1]
    assert fields["response_ids"] == [2, 2, 5, 6]
    assert fields["response_mask"] == [1, 1, 0, 1]
    assert fields["response_logprobs"] == [-0.5, -0.25, 0.0, -1.0]
    assert (fields["reward_score"], fields["num_turns"]) == (0.5, 4)


@pytest.mark.slow
def test_verl_s_own_classes_take_them(written: WrittenRun, tmp_path: Path) -> None:
    source = Path(TRAINERS) / "verl"
    if not TRAINERS or not source.is_dir():
        pytest.skip("KUBEROLL_TEST_TRAINERS names no directory with verl's source")
    result = tmp_path / "result.json"
    places = [str(source), str(Path(TRAINERS) / "packages"), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("verl_classes.py")), str(written.path), str(source), str(result)],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    assert json.loads(result.read_text()) == ["positions", "batches", "advantages", "agent loop"]
