"""One of several processes of TRL's trainer on a run; writes what it was given. Run by test_trl.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from kuberoll.trainer import Rollouts
from tests.trainer.adapters.test_trl import REPEATS, trainer_for

run, output, steps = sys.argv[1:]
trainer = trainer_for(
    Rollouts.open(run), Path(output) / "trl", per_device_train_batch_size=REPEATS, max_steps=int(steps)
)
inner: Any = trainer.rollout_func
given: list[Any] = []


def noting(prompts: Any, of: Any) -> Any:
    columns = inner(prompts, of)
    given.append([columns["task_index"], columns["completion_ids"]])
    return columns


trainer.rollout_func = noting
error = ""
try:
    trainer.train()
except Exception as raised:
    error = f"{type(raised).__name__}: {raised}"
rank = os.environ["RANK"]
model = trainer.accelerator.unwrap_model(trainer.model)
digest = {name: float(tensor.double().sum()) for name, tensor in model.state_dict().items()}
(Path(output) / f"{rank}.json").write_text(
    json.dumps({"given": given, "published": trainer.published, "weights": digest, "error": error})
)
