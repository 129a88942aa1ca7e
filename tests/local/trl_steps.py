"""TRL's trainer of the example on a run; writes what each step's loss saw. Run by test_trl.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer

from examples.train.trl_grpo import make_trainer
from kuberoll.trainer import Rollouts


class Recorded(GRPOTrainer):  # type: ignore[misc]
    """Records TRL's own log-probabilities of the sampled tokens beside those of the run."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.steps: list[dict[str, Any]] = []
        self.versions: list[Any] = []
        inner: Any = self.rollout_func

        def noting(prompts: Any, trainer: Any) -> Any:
            columns = inner(prompts, trainer)
            self.versions.append(columns["policy_version"])
            return columns

        self.rollout_func: Any = noting

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            own, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
        sampled = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        difference = (own - inputs["sampling_per_token_logps"])[sampled].abs()
        self.steps.append(
            {
                "loss": loss.item(),
                "tokens": int(sampled.sum()),
                "difference": difference.max().item(),
                "advantages": inputs["advantages"].tolist(),
                "versions": self.versions[-1],
            }
        )
        return loss


run, output, steps = sys.argv[1:]
rollouts = Rollouts.open(run, consumer="trl", timeout=300)
trainer = make_trainer(rollouts, Path(output), steps=int(steps), groups=4, trainer_class=Recorded)
trainer.train()
rollouts.stop()
(Path(output) / "steps.json").write_text(
    json.dumps({"steps": trainer.steps, "logs": [entry for entry in trainer.state.log_history if "reward" in entry]})
)
