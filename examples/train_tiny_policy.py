"""Train the tiny policy that the examples play with.

    python examples/train_tiny_policy.py

It imitates experts that play the built-in environments. The same machine and the same libraries give the same
weights. `--random` writes the model as it is before training.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from tiny_policy.episodes import play_all, training_tasks
from tiny_policy.evaluation import mean_reward
from tiny_policy.tokens import encode, train_tokenizer
from tiny_policy.training import new_model, train
from transformers import GenerationConfig
from transformers.utils import logging

from kuberoll_workers.environments.builtin.calculator import CalculatorEnvironment
from kuberoll_workers.environments.builtin.sliding_puzzle import SlidingPuzzleEnvironment

# Only the words of the environments matter to the tokenizer, and they are all in the first few thousand episodes.
TOKENIZER_EPISODES = 2000


def main() -> None:
    arguments = _arguments()
    logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    started = time.monotonic()
    tasks = training_tasks()
    texts = [message["content"] for log in play_all(tasks, TOKENIZER_EPISODES, arguments.seed) for message in log]
    tokenizer = train_tokenizer(texts)
    model = new_model(tokenizer, arguments.seed)
    if not arguments.random:
        examples = [encode(tokenizer, log) for log in play_all(tasks, arguments.episodes, arguments.seed)]
        tokens = sum(len(ids) for ids, _ in examples)
        print(f"{len(examples)} episodes, {tokens} tokens, {time.monotonic() - started:.0f} s", flush=True)
        train(model, examples, steps=arguments.steps, batch=arguments.batch, seed=arguments.seed)
    # Stored as bfloat16; what is looked at below is what is stored.
    model = model.bfloat16()
    arguments.output.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    print(f"saved to {arguments.output} after {time.monotonic() - started:.0f} s", flush=True)
    if arguments.random:
        return
    model = model.float().eval()
    for name, environment in {
        "sliding_puzzle": SlidingPuzzleEnvironment({"size": 2, "shuffleMoves": 10, "maxMoves": 6}),
        "calculator": CalculatorEnvironment({"steps": 2, "maxCalls": 6}),
    }.items():
        reward = mean_reward(model, tokenizer, environment, episodes=arguments.evaluated, seed=arguments.seed + 1)
        print(f"{name}: mean reward {reward:.3f} over {arguments.evaluated} episodes at temperature 1", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent / "models" / "tiny-policy"
    parser.add_argument("--output", type=Path, default=default, help="directory to write (default: %(default)s)")
    parser.add_argument("--random", action="store_true", help="do not train: random weights, for comparison")
    parser.add_argument("--steps", type=int, default=2500, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="episodes per step (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=24_000, help="episodes to learn from (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--evaluated", type=int, default=256, help="episodes to look at afterwards (default: 256)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
