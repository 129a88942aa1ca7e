"""The loop's public names, and what they load."""

from __future__ import annotations

import subprocess
import sys

from kuberoll_workers import rollouts
from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.rollouts.streaming import stream_groups

NAMES = {
    "GroupPolicy", "Partial", "Prompt", "Rollout", "RolloutSettings", "Sample", "SampleGroup", "TrajectoryFailed",
    "rewards_differ", "run_groups", "run_rollout", "stream_groups", "stream_trajectories",
}  # fmt: skip


def test_every_exported_name_is_there() -> None:
    assert set(rollouts.__all__) == NAMES
    for name in rollouts.__all__:
        assert getattr(rollouts, name).__name__ == name
    assert rollouts.Sample is Sample
    assert rollouts.stream_groups is stream_groups


def test_the_loop_loads_neither_an_engine_nor_the_faces_of_nemo_rl() -> None:
    script = (
        "import sys\n"
        "from kuberoll_workers.rollouts import *\n"
        "heavy = {'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules)\n"
        "print(sorted(heavy), [name for name in sys.modules if 'nemo_rl' in name])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[] []"
