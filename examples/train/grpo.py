"""GRPO in plain PyTorch: a trainer beside a continuous job, short enough to begin one's own from.

    kuberoll run examples/train/rolloutjob.yaml --output runs/train/run      # in one terminal
    python examples/train/grpo.py runs/train                                 # in another

Each step takes whole prompt groups as they finish, makes one gradient step, and publishes the new weights to the
engine, which does not stop for them. Killed at any point and started again, it goes on from its last checkpoint: what
it had learned since is forgotten, and those groups are delivered again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from held_out import held_out_reward
from picture import draw
from steps import Step, append, read
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from kuberoll.trainer import Batch, Rollouts

MODEL = Path(__file__).parents[1] / "models" / "early-policy"
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""How far a step may change a token's probability; further upwards, so that rare good moves grow (arXiv 2503.14476)."""
MOST_TOKENS = 8192
"""Tokens in one forward pass, with padding."""


def main() -> None:
    arguments = _arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    directory: Path = arguments.directory
    rollouts = Rollouts.open(str(directory / "run"), consumer="grpo", timeout=300)
    trainer = Trainer(rollouts, directory, learning_rate=arguments.learning_rate, planned=arguments.steps)
    if trainer.load():
        # The engine may have weights of steps that are forgotten.
        rollouts.publish(trainer.model)
    elif arguments.evaluate_every:
        trainer.note(Step(step=0, version=0, groups=[], held_out=trainer.evaluate()))
    batches = rollouts.batches(arguments.groups, advantages="grpo", timeout=300)
    began = time.monotonic()
    while trainer.step < arguments.steps:
        batch = next(batches)
        received = time.monotonic()
        lag = lags(batch, rollouts.version)
        trainer.learn(batch)
        trained = time.monotonic()
        rollouts.publish(trainer.model)
        published = time.monotonic()
        trainer.step += 1
        every = arguments.evaluate_every
        measured = every and (trainer.step % every == 0 or trainer.step == arguments.steps)
        step = Step(
            step=trainer.step,
            version=rollouts.version,
            groups=[tuple(group.key) for group in batch.groups],
            reward=float(batch.reward.mean()),
            lag=float(lag.mean()),
            most_lag=int(lag.max()),
            tokens=int(batch.loss_mask.sum()),
            stale_tokens=rollouts.counts.stale_tokens,
            waited=received - began,
            trained=trained - received,
            published=published - trained,
            held_out=trainer.evaluate() if measured else None,
        )
        trainer.note(step)
        trainer.save()
        began = time.monotonic()
    rollouts.stop()


class Trainer:
    """A model, its optimizer and its place in the run, which are saved and loaded as one."""

    def __init__(self, rollouts: Rollouts, directory: Path, *, learning_rate: float, planned: int) -> None:
        self.rollouts = rollouts
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.0)
        self.step = 0
        self._learning_rate, self._planned = learning_rate, planned
        self._directory, self._checkpoint = directory, directory / "checkpoint.pt"

    def load(self) -> bool:
        """Go on from the checkpoint; False if there is none."""
        if not self._checkpoint.exists():
            return False
        saved = torch.load(self._checkpoint)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.rollouts.load_state_dict(saved["rollouts"])
        self.step = saved["step"]
        return True

    def save(self) -> None:
        """Replace the checkpoint, whole or not at all."""
        saved: dict[str, Any] = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        saved |= {"rollouts": self.rollouts.state_dict(), "step": self.step}
        new = self._checkpoint.with_suffix(".new")
        torch.save(saved, new)
        new.replace(self._checkpoint)

    def learn(self, batch: Batch) -> None:
        """One gradient step on GRPO's clipped objective, averaged over the sampled tokens of the batch."""
        tokens = int(batch.loss_mask.sum())
        for part in batch.minibatches(max_tokens=MOST_TOKENS):
            row = part.torch()
            # Where a group's rewards are equal it teaches nothing: its rows would cost as much, and add 0.
            used = row["advantages"] != 0
            if used.any():
                gain = clipped_gain(self.model, {name: value[used] for name, value in row.items()})
                (-gain.sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self._learning_rate * max(0.1, 1 - self.step / self._planned)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> float:
        """Mean reward of held-out puzzles with the newest weights."""
        version = self.rollouts.version
        return held_out_reward(self._directory / "run", self._directory / f"held-out-{version}")

    def note(self, step: Step) -> None:
        """Print a step, keep it, and draw all until now."""
        print(step, flush=True)
        append(self._directory / "steps.jsonl", step)
        draw(read(self._directory / "steps.jsonl"), self._directory / "learning.svg")


def clipped_gain(model: Any, row: dict[str, torch.Tensor]) -> torch.Tensor:
    """What is to grow, for each sampled token, [tokens]: its advantage times how much likelier it has become.

    The rows' `logprobs` are those of the weights that sampled the token: the ratio is right for older ones, too.
    """
    sampled = row["loss_mask"][:, 1:]
    hidden = model.model(input_ids=row["input_ids"], attention_mask=row["attention_mask"]).last_hidden_state
    # A token is predicted at the position before it; only sampled tokens need logits.
    logprobs = model.lm_head(hidden[:, :-1][sampled]).log_softmax(-1)
    new = logprobs.gather(-1, row["input_ids"][:, 1:][sampled][:, None])[:, 0]
    ratio = (new - row["logprobs"][:, 1:][sampled]).exp()
    advantages = row["advantages"][:, None].expand_as(sampled)[sampled]
    return torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)


def lags(batch: Batch, version: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Versions between the oldest token of each row and the newest weights, [rows]."""
    oldest = np.where(batch.loss_mask, batch.policy_version, version).min(axis=1)
    return np.asarray(version - oldest)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the training: its job's output is in `run` there")
    parser.add_argument("--steps", type=int, default=80, help="gradient steps (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=8, help="prompt groups of a step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="at the first step (default: %(default)s)")
    parser.add_argument("--evaluate-every", type=int, default=20, metavar="STEPS", help="0: never (default: 20)")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; the engine has the others (default: 1)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
