"""CPU time of NeMo RL's functions as faces over the loop, per turn, beside the loop itself in the same run.

256 trajectories of 8 turns and 64 generated tokens, with a policy, an environment and a tokenizer of NeMo RL's
interfaces that take no time: what is left is the conversion of batches to samples, of tensors to token ids, and back.
What is counted is the CPU time of the whole process, less what the policy itself took to put its tensors together.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch

from benchmarks.parts import InstantEnvironment
from benchmarks.rollout_loop import TOKENS, microseconds_per_turn
from kuberoll_workers.adapters.nemo_rl import BatchedDataDict, run_async_multi_turn_rollout, run_multi_turn_rollout
from kuberoll_workers.rollouts.settings import Scheduling

TASK = "instant"


class InstantPolicy:
    """The same tokens, at once, by both of NeMo RL's methods.

    Attributes:
        seconds: CPU time that it took itself.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = torch.arange(tokens)
        self._logprobs = torch.full((tokens,), -0.5)
        self.seconds = 0.0

    def generate(self, data: Any, greedy: bool = False) -> Any:
        began = time.thread_time()
        output = self._output(data)
        self.seconds += time.thread_time() - began
        return output

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        output = self.generate(data, greedy)
        yield 0, output

    def _output(self, data: Any) -> Any:
        ids, lengths = data["input_ids"], data["input_lengths"]
        count, new = len(self._tokens), len(lengths)
        output = torch.nn.functional.pad(ids, (0, count))
        logprobs = torch.zeros(output.shape)
        for row, length in enumerate(lengths.tolist()):
            output[row, length : length + count] = self._tokens
            logprobs[row, length : length + count] = self._logprobs
        return BatchedDataDict[Any](
            {
                "output_ids": output,
                "logprobs": logprobs,
                "generation_lengths": torch.full((new,), count),
                "unpadded_sequence_lengths": lengths + count,
                "truncated": torch.zeros(new, dtype=torch.bool),
            }
        )


class InstantTokenizer:
    """Sixteen tokens for any text."""

    pad_token_id = 0
    _ids = torch.arange(16)[None]

    def __call__(self, text: str, *, return_tensors: str, add_special_tokens: bool) -> dict[str, Any]:
        return {"input_ids": self._ids}

    def batch_decode(self, batch: Sequence[Any], *, skip_special_tokens: bool) -> list[str]:
        return ["text"] * len(batch)


def batch_of(count: int, turns: int, *, prompt: int = 100) -> Any:
    """Samples of so many turns, each with a prompt of its own."""
    return BatchedDataDict[Any](
        {
            "message_log": [
                [{"role": "user", "content": "prompt", "token_ids": torch.arange(prompt)}] for _ in range(count)
            ],
            "extra_env_info": [{"left": turns, "number": number} for number in range(count)],
            "task_name": [TASK] * count,
            "loss_multiplier": torch.ones(count),
            "idx": list(range(count)),
        }
    )


def of_the_face(run: Callable[..., Any], count: int, turns: int) -> float:
    """CPU microseconds of one turn of one sample."""
    policy, batch = InstantPolicy(TOKENS), batch_of(count, turns)
    began = time.process_time()
    _, metrics = run(policy, batch, InstantTokenizer(), {TASK: InstantEnvironment()}, 10_000_000, turns)
    seconds = time.process_time() - began - policy.seconds
    assert metrics["total_turns"] == count * turns, metrics
    return seconds / (count * turns) * 1e6


def told(name: str, times: list[float]) -> str:
    return (
        f"{name:32} {statistics.median(times):6.1f} µs CPU per turn (median of {len(times)} rounds, "
        f"{min(times):.1f} to {max(times):.1f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    count, turns = arguments.trajectories, arguments.turns
    faces: tuple[tuple[Callable[..., Any], Scheduling], ...] = (
        (run_multi_turn_rollout, "Lockstep"),
        (run_async_multi_turn_rollout, "Concurrent"),
    )
    for run, scheduling in faces:
        native: list[float] = []
        face: list[float] = []
        # In turns, so that whatever else the machine does is in both.
        for _ in range(arguments.rounds):
            native.append(asyncio.run(microseconds_per_turn(scheduling, count, turns)))
            face.append(of_the_face(run, count, turns))
        print(told(f"{scheduling}, the loop itself", native))
        print(told(run.__name__, face))
        print(f"{'':32} {statistics.median(face) / statistics.median(native):6.2f} × the loop itself")


if __name__ == "__main__":
    main()
