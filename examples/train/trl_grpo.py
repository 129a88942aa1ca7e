"""TRL's GRPOTrainer on a run of KubeRoll: the run plays whole episodes, and gets new weights after each step.

Two terminals; the run is strictly on-policy, and goes on until the trainer stops it:

    kuberoll run examples/sliding-puzzle/rolloutjob.yaml --output runs/trl \\
        --set spec.dataset.epochs=null --set spec.rollout.onPolicy.maxLag=0
    python examples/train/trl_grpo.py runs/trl
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from kuberoll.trainer import Rollouts
from kuberoll.trainer.adapters.trl import (
    RolloutFunction,
    environment_reward,
    stand_in_dataset,
    state_callback,
)

MODEL = Path(__file__).parents[1] / "models" / "tiny-policy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="output of the run")
    parser.add_argument("--output", type=Path, default=Path("runs/trl-training"), help="checkpoints")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8, help="prompt groups of a step")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    chosen = parser.parse_args()
    rollouts = Rollouts.open(chosen.run, consumer="trl", timeout=600)
    trainer = make_trainer(rollouts, chosen.output, steps=chosen.steps, groups=chosen.groups)
    trainer.train(resume_from_checkpoint=chosen.resume)
    rollouts.stop()


def make_trainer(
    rollouts: Rollouts, output: Path, *, steps: int, groups: int, trainer_class: type[GRPOTrainer] = GRPOTrainer
) -> GRPOTrainer:
    """The trainer of this example."""
    generations = rollouts.manifest.identity["dataset.repeats"]
    # With a larger maxLag samples may be of older weights: then off_policy(trainer_class), of the same module.
    return trainer_class(
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
        rollout_func=RolloutFunction(rollouts, publish=rollouts.publish, timeout=600),
        callbacks=[state_callback(rollouts)],
    )


if __name__ == "__main__":
    main()
