"""TRL's GRPOTrainer on a run of KubeRoll: the run plays whole episodes, and gets new weights after each step.

Three terminals:

    kuberoll serve examples/sliding-puzzle/rolloutjob.yaml
    kuberoll run examples/sliding-puzzle/rolloutjob.yaml --output runs/trl
    python examples/train/trl_grpo.py runs/trl --engine ~/.local/state/kuberoll/serve/sliding-puzzle.json
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from kuberoll.trainer import Rollouts
from kuberoll.trainer.adapters.trl import (
    RolloutFunction,
    environment_reward,
    off_policy,
    stand_in_dataset,
    state_callback,
)

MODEL = Path(__file__).parents[1] / "models" / "tiny-policy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="output of the run")
    parser.add_argument(
        "--engine", type=Path, required=True, help="file with URL and tokens that kuberoll serve printed"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/trl-training"), help="checkpoints and weights")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8, help="prompt groups of a step")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    chosen = parser.parse_args()
    trainer = make_trainer(chosen.run, chosen.engine, chosen.output, steps=chosen.steps, groups=chosen.groups)
    trainer.train(resume_from_checkpoint=chosen.resume)


def make_trainer(
    run: str, engine: Path, output: Path, *, steps: int, groups: int, trainer_class: type[GRPOTrainer] = GRPOTrainer
) -> GRPOTrainer:
    """The trainer of this example."""
    rollouts = Rollouts.open(run, consumer="trl", timeout=600)
    generations = rollouts.manifest.identity["dataset.repeats"]
    # The run goes on while a step is made, so its samples may be of older weights.
    return off_policy(trainer_class)(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        args=GRPOConfig(
            output_dir=str(output),
            per_device_train_batch_size=groups * generations,
            num_generations=generations,
            max_steps=steps,
            learning_rate=1e-5,
            logging_steps=1,
            save_steps=10,
            temperature=1.0,  # as the run samples
            loss_type="dr_grpo",
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            report_to=[],
        ),
        train_dataset=stand_in_dataset(steps * groups),
        reward_funcs=environment_reward,
        rollout_func=RolloutFunction(rollouts, publish=Publisher(engine, output / "weights"), timeout=600),
        callbacks=[state_callback(rollouts)],
    )


class Publisher:
    """Weights as files beside the engine, which it is told to load."""

    def __init__(self, engine: Path, directory: Path) -> None:
        self.engine = json.loads(engine.read_text())
        self.directory = directory

    def __call__(self, model: Any) -> None:
        version = 1 + int(self.call("read")["wanted"])
        path = self.directory.absolute() / str(version)
        model.save_pretrained(path)
        self.call("weights", {"uri": str(path), "version": str(version)})

    def call(self, scope: str, body: dict[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            self.engine["url"] + "/v1/weights",
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {self.engine['tokens'][scope]}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


if __name__ == "__main__":
    main()
