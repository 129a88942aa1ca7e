"""TRL's GRPOTrainer on a run with the real engine, which gets the trainer's weights."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local.support import EXAMPLES, running

pytestmark = [pytest.mark.engine, pytest.mark.long]

ROOT = EXAMPLES.parent
JOB = EXAMPLES / "sliding-puzzle" / "rolloutjob.yaml"
STEPS = 5
CHANGES = ("--set", "spec.dataset.epochs=null", "--set", "spec.rollout.onPolicy.maxLag=0")


def test_five_steps_of_the_example(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "trl"
    with running(JOB, *CHANGES, "--output", run, "--metrics-port", "0", torch=True) as rollouts:
        done = subprocess.run(
            [sys.executable, "-m", "tests.local.trl_steps", str(run), str(output), str(STEPS)],
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
            cwd=ROOT,
            env=os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr + rollouts.printed()
        # The trainer has stopped it.
        assert rollouts.finish() == 0, rollouts.printed()
    found = json.loads((output / "steps.json").read_text())
    steps = found["steps"]
    assert len(steps) == STEPS
    for step in steps:
        assert math.isfinite(step["loss"])
        assert step["tokens"] > 0
    # Strictly on-policy: TRL computes what the engine sampled from, also after each publication.
    for number, step in enumerate(steps):
        assert {*step["versions"]} == {number}
        assert step["difference"] < 1e-3
    assert any(advantage != 0 for step in steps for advantage in step["advantages"])
    for log in found["logs"]:
        assert math.isfinite(log["grad_norm"])
        assert 0 <= log["rewards/environment_reward/mean"] <= 1
