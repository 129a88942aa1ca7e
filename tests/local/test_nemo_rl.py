"""NeMo RL's own rollouts over an engine that `kuberoll serve` runs: real source, real environment, real vLLM."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.local.support import EXAMPLES, TINY, running

pytestmark = pytest.mark.engine

NEMO_RL = [place for place in os.environ.get("KUBEROLL_TEST_NEMO_RL", "").split(":") if place]
"""Directories with NeMo RL's source and what it imports, as in PYTHONPATH."""


def run_beside(
    manifest: Path, script: str, arguments: Callable[[str], list[str | Path]], tmp_path: Path, result: Path
) -> Any:
    """Run a script beside a served engine.

    Args:
        arguments: The script's arguments, from the file with the engine's address and tokens.
        result: The file that the script writes.

    Returns:
        What it wrote.
    """
    with running(manifest, command="serve", torch=True) as engine:
        tokens = engine.until("^tokens: (.*)$")[1]
        engine.until("Ctrl-C ends it")
        # NeMo RL needs other versions of libraries than this process has loaded.
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name(script), *arguments(tokens)],
            capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*NEMO_RL, *filter(None, sys.path)])},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return json.loads(result.read_text())


@pytest.fixture(autouse=True)
def nemo_rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not NEMO_RL:
        pytest.skip("KUBEROLL_TEST_NEMO_RL names no directory with NeMo RL's source")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_nemo_rl_s_rollouts_use_the_fleet_and_its_weights(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    found = run_beside(
        EXAMPLES / "sliding-puzzle" / "rolloutjob.yaml",
        "nemo_rl_steps.py",
        lambda tokens: [TINY, tokens, tmp_path / "weights", result],
        tmp_path,
        result,
    )
    assert set(found) == {"blocking", "asynchronous", "after weights"}
    for name, rollouts in found.items():
        assert rollouts["largest"] < 1e-3, name
        assert rollouts["compared"] > 0
        # Some episodes go on after their first turn.
        assert rollouts["turns"] > len(rollouts["rewards"]), name


@pytest.mark.parametrize("loop", ["synchronous", "asynchronous"])
def test_nemo_rl_s_grpo_trains_on_the_fleet(loop: str, tmp_path: Path) -> None:
    example = Path("examples/configs/grpo_sliding_puzzle.yaml")
    config = next((place / example for place in map(Path, NEMO_RL) if (place / example).exists()), None)
    if config is None:
        pytest.skip(f"KUBEROLL_TEST_NEMO_RL names no directory with {example}")
    told = run_beside(
        EXAMPLES / "train" / "rolloutjob.yaml",
        "nemo_rl_training.py",
        lambda tokens: [loop, config, EXAMPLES / "models" / "early-policy", tokens, tmp_path],
        tmp_path,
        tmp_path / "told.json",
    )
    steps = [told["train"][str(step)] for step in range(1, len(told["train"]) + 1)]
    assert len(steps) == 12
    # Weights were published before each step.
    assert told["version"] >= 12
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)
    for step in steps:
        if loop == "synchronous":
            # NeMo RL's own measure of how far its log-probabilities are from those that the engine reported.
            assert step["token_mult_prob_error"] < 1.001
        else:
            assert step["avg_trajectory_age"] <= 1
            assert step["sampling_importance_ratio"] == pytest.approx(1, abs=0.1)
    rewards = [step["reward"] for step in steps]
    assert sum(rewards[-4:]) > sum(rewards[:4])
