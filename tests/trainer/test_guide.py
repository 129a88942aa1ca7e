"""The loop of docs/how-to/training.md, with a real model, killed after a checkpoint and started again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from kuberoll_workers.data.messages import Message, token_array
from tests.trainer.support import WrittenRun, trajectory

ROOT = Path(__file__).parents[2]
GROUPS = 20


@pytest.mark.slow
def test_the_loop_of_the_guide_trains_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/training.md").read_text(), flags=re.DOTALL)
    script, checkpoint = tmp_path / "grpo.py", tmp_path / "checkpoint.pt"
    script.write_text(code)
    run = WrittenRun(tmp_path / "run", groups=GROUPS)
    for task in range(GROUPS):
        for rollout in range(2):
            record = trajectory(task, rollout, reward=float(rollout))
            record.messages = [
                Message("user", "", token_array([1, 2, 3])),
                Message(
                    "assistant",
                    "",
                    token_array([4 + rollout, 5]),
                    array("f", [-3.0, -3.0]),
                    1,
                    [("0", 0, 2)],
                    sampled=True,
                ),
            ]
            run.write(record)
    model = ROOT / "examples" / "models" / "tiny-policy"
    command = [sys.executable, str(script), str(run.path), str(model), str(checkpoint)]
    first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["groups 8", "groups 16", "groups 20"]
    assert lines[0].endswith("reward 0.500  tokens 32")
    # What was delivered is in the checkpoint: the next start has nothing left to do.
    second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (second.returncode, second.stdout) == (0, ""), second.stderr
    import torch

    saved = torch.load(checkpoint)
    assert json.loads(json.dumps(saved["rollouts"]))["counts"]["groups"] == GROUPS
    before = torch.load(checkpoint)["model"]
    from transformers import AutoModelForCausalLM

    untrained = AutoModelForCausalLM.from_pretrained(str(model)).state_dict()
    assert any(not torch.equal(before[name].float(), untrained[name].float()) for name in untrained)
