"""The tiny policy's model and its training: plain imitation of the experts, on a CPU, in minutes."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tiny_policy.muon import Muon
from tiny_policy.tokens import IGNORED, MAX_POSITIONS, VOCABULARY

Example = tuple[list[int], list[int]]
"""Token ids and labels, of the same length."""


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama of 0.9 million weights, random."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, examples: Sequence[Example], *, steps: int, batch: int, seed: int) -> None:
    """Imitate the examples' replies, with a short warm-up and then a cosine down to nothing.

    Args:
        batch: Examples per step, of about the same length.
    """
    optimizers = _optimizers(model)
    warm_up = max(1, min(60, steps // 10))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        )
        for optimizer in optimizers
    ]
    batches = _batches(examples, batch, random.Random(seed))
    model.train()
    started = time.monotonic()
    for step in range(1, steps + 1):
        ids, labels = next(batches)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)
    model.eval()


def _optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        (matrices if weight.ndim == 2 and "embed" not in name else others).append(weight)
    return [
        Muon(matrices, lr=4e-3, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def _batches(
    examples: Sequence[Example], size: int, draw: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of examples of about the same length, in random order, for ever."""
    ordered = sorted(examples, key=lambda example: len(example[0]))
    starts = list(range(0, len(ordered) - size + 1, size))
    while True:
        draw.shuffle(starts)
        for start in starts:
            yield _padded(ordered[start : start + size])


def _padded(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    # Padding comes last: causal attention keeps it out of what is learned without a mask.
    length = max(len(ids) for ids, _ in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    labels = torch.full((len(examples), length), IGNORED)
    for row, (example_ids, example_labels) in enumerate(examples):
        ids[row, : len(example_ids)] = torch.tensor(example_ids)
        labels[row, : len(example_labels)] = torch.tensor(example_labels)
    return ids, labels
