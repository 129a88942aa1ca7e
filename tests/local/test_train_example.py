"""examples/train with the real engine, for a few steps: its trainer is killed, and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.local.support import EXAMPLES, PATIENCE_SECONDS, running, trajectories

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS, GROUPS, REPEATS = 4, 2, 8


def trainer(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / "train" / "grpo.py"), str(directory)]
    command += ["--steps", str(STEPS), "--groups", str(GROUPS), "--evaluate-every", "0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_trainer_goes_on_and_has_each_group_once(tmp_path: Path) -> None:
    output = tmp_path / "run"
    job = EXAMPLES / "train" / "rolloutjob.yaml"
    with running(job, "--output", output, "--metrics-port", "0", torch=True) as run:
        run.until("^policy: ")
        # The first life ends with a step that may be in the log and in no checkpoint.
        for life, steps in enumerate((2, STEPS)):
            process = trainer(tmp_path)
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith(f"step {steps:3} ") and steps < STEPS:
                        process.kill()
                        break
                code = process.wait(timeout=PATIENCE_SECONDS)
                assert code == (0 if steps == STEPS else -9), f"life {life}"
            finally:
                process.kill()
                process.wait(timeout=PATIENCE_SECONDS)
                process.stdout.close()
        # The trainer has stopped the run.
        assert run.finish() == 0, run.printed()
    lines: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    versions = [line["version"] for line in lines]
    assert all(before < after for before, after in pairwise(versions))
    steps_by_number = {line["step"]: line for line in lines}
    assert sorted(steps_by_number) == [1, 2, 3, 4]
    # The weights of the checkpoint were published once more.
    assert versions[-1] > STEPS
    assert all(0 <= line["most_lag"] <= 2 for line in lines)
    groups = [tuple(key) for step in steps_by_number.values() for key in step["groups"]]
    assert len(groups) == len(set(groups)) == STEPS * GROUPS
    stored = trajectories(output)
    assert set(groups) <= {(record.task_index, record.rollout_index // REPEATS) for record in stored}
    sampled_by = {
        version for record in stored for message in record.messages for version, *_ in message.policy_versions or ()
    }
    assert "0" in sampled_by
    assert len(sampled_by) > 1
    assert (tmp_path / "learning.svg").exists()
