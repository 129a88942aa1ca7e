"""TRL's GRPOTrainer on a run with the real engine, which gets the trainer's weights."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local.support import EXAMPLES, running, trajectories, wait_for_trajectories

pytestmark = pytest.mark.engine

ROOT = EXAMPLES.parent
JOB = EXAMPLES / "sliding-puzzle" / "rolloutjob.yaml"
STEPS = 5
# More than the trainer needs, so that the run still samples when the last weights come.
CHANGES = ("--set", "spec.dataset.source.generator.count=4000", "--set", "spec.rollout.concurrency=4")


def test_five_steps_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run, output = tmp_path / "run", tmp_path / "trl"
    with running(JOB, *CHANGES, command="serve", torch=True) as engine:
        tokens = engine.until("^tokens: (.*)$")[1]
        engine.until("Ctrl-C ends it")
        with running(JOB, *CHANGES, "--output", run, "--metrics-port", "0") as rollouts:
            done = subprocess.run(
                [sys.executable, "-m", "tests.local.trl_steps", str(run), tokens, str(output), str(STEPS)],
                capture_output=True,
                text=True,
                timeout=500,
                check=False,
                cwd=ROOT,
                env=os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1"},
            )
            assert done.returncode == 0, done.stdout + done.stderr
            # Weights are published before a step takes its groups: after five steps, four times.
            newest = STEPS - 1
            stored = len(trajectories(run))
            while newest not in versions_of(run):
                wait_for_trajectories(rollouts, run, stored)
                stored = len(trajectories(run))
    found = json.loads((output / "steps.json").read_text())
    steps = found["steps"]
    assert len(steps) == STEPS
    for step in steps:
        assert math.isfinite(step["loss"])
        assert step["tokens"] > 0
    # Before weights change, TRL computes what the engine sampled from.
    assert {*steps[0]["versions"]} == {0}
    assert steps[0]["difference"] < 1e-3
    assert any(advantage != 0 for step in steps for advantage in step["advantages"])
    for log in found["logs"]:
        assert math.isfinite(log["grad_norm"])
        assert 0 <= log["rewards/environment_reward/mean"] <= 1


def versions_of(run: Path) -> set[int]:
    return {
        int(version)
        for record in trajectories(run)
        for message in record.messages
        for version, _, _ in message.policy_versions or ()
    }
