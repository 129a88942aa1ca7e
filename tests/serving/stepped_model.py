"""The tiny policy after something like a trainer's step, and what transformers says with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaForCausalLM

from tests.local.support import TINY


def stepped(seed: int) -> Any:
    """The model after a large step of some weights."""
    model = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, generator=draw) < 0.05
            parameter += chosen * torch.randn(parameter.shape, generator=draw) * parameter.std()
    return model


def greedy_ids(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """So many tokens of the model's greedy response, by transformers."""
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=2
        )
    return list(map(int, ids[0, len(prompt) :]))
