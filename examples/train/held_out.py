"""Measure a policy by puzzles that it is not trained on: a short run at the engine of the training's run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MANIFEST = Path(__file__).parent / "held-out.yaml"


def held_out_reward(run: Path, output: Path) -> float:
    """Mean reward of the held-out puzzles with the weights that the engine has now.

    Args:
        run: Directory of the run whose engine is used.
        output: Of the short run; if it has been interrupted, it goes on.

    Raises:
        RuntimeError: The short run failed; the message has what it printed.
    """
    policy = json.loads((run / "policy.json").read_text())
    token = json.loads(Path(policy["tokens"]).read_text())["generate"]
    command = [str(Path(sys.executable).with_name("kuberoll")), "run", str(MANIFEST), "--endpoint", policy["url"]]
    done = subprocess.run(
        [*command, "--output", str(output), "--resume", "--metrics-port", "0"],
        capture_output=True,
        text=True,
        env={**os.environ, "KUBEROLL_TOKEN": token},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    aggregates = json.loads((output / "aggregate_metrics.json").read_text())
    reward: float = aggregates["environments"]["sliding_puzzle"]["fields"]["total_reward"]["mean"]
    return reward
