"""NeMo RL's own rollouts over an engine that `kuberoll serve` runs: real source, real environment, real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local.support import EXAMPLES, TINY, running

pytestmark = pytest.mark.engine

NEMO_RL = [place for place in os.environ.get("KUBEROLL_TEST_NEMO_RL", "").split(":") if place]
"""Directories with NeMo RL's source and what it imports, as in PYTHONPATH."""


def test_nemo_rl_s_rollouts_use_the_fleet_and_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not NEMO_RL:
        pytest.skip("KUBEROLL_TEST_NEMO_RL names no directory with NeMo RL's source")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with running(EXAMPLES / "sliding-puzzle" / "rolloutjob.yaml", command="serve", torch=True) as engine:
        tokens = engine.until("^tokens: (.*)$")[1]
        engine.until("Ctrl-C ends it")
        script, result = Path(__file__).with_name("nemo_rl_steps.py"), tmp_path / "result.json"
        # NeMo RL needs other versions of libraries than this process has loaded.
        done = subprocess.run(
            [sys.executable, str(script), str(TINY), tokens, str(tmp_path / "weights"), str(result)],
            capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*NEMO_RL, *filter(None, sys.path)])},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    found = json.loads(result.read_text())
    assert set(found) == {"blocking", "asynchronous", "after weights"}
    for name, rollouts in found.items():
        assert rollouts["largest"] < 1e-3, name
        assert rollouts["compared"] > 0
        # Some episodes go on after their first turn.
        assert rollouts["turns"] > len(rollouts["rewards"]), name
