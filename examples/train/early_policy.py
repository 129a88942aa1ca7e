"""Make the policy with which the training begins: the tiny policy after the first steps of another schooling.

    python examples/train/early_policy.py

It imitates an expert that draws most of its moves at random, on the boards of `train.jsonl`. So it can write
moves, and prefers good ones only a little. The same machine and the same libraries give the same weights.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from puzzles import CONFIG, HERE
from tiny_policy import experts
from tiny_policy.episodes import Task, play
from tiny_policy.tokens import encode
from tiny_policy.training import new_model, train
from transformers import AutoTokenizer, GenerationConfig

from kuberoll_workers.environments.builtin.sliding_puzzle import SlidingPuzzleEnvironment

MODELS = Path(__file__).parents[1] / "models"
RANDOM_MOVE = 0.6
EPISODES = 8000
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=MODELS / "early-policy", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=600, help="of 16 episodes (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Words, and so the tokens, are the same for boards of any size.
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-policy")
    experts.RANDOM_MOVE = RANDOM_MOVE
    task = Task(SlidingPuzzleEnvironment(CONFIG), experts.puzzle_expert, share=1.0)
    rows = [json.loads(line) for line in (HERE / "train.jsonl").read_text().splitlines()]
    draw = random.Random(0)
    examples = [encode(tokenizer, play(task, draw.choice(rows), draw)) for _ in range(EPISODES)]
    model = new_model(tokenizer, seed=0)
    train(model, examples, steps=arguments.steps, batch=16, seed=0)
    model = model.bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(arguments.output)
    for name in TOKENIZER:
        shutil.copy(MODELS / "tiny-policy" / name, arguments.output)
    print(f"saved to {arguments.output}")


if __name__ == "__main__":
    main()
