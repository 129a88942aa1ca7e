"""Weights of a mixture of experts, which layers on CPUs have packed, from a trainer to the real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from kuberoll.trainer import Broadcast
from kuberoll.trainer.transports import Files
from kuberoll_workers.serving.engines.vllm_engine import VLLMEngine
from tests.serving.stepped_model import greedy_ids
from tests.serving.test_vllm import TINY, request

pytestmark = pytest.mark.engine

PROMPT = list(range(5, 45))
TOKENS = 16


def experts(seed: int) -> Any:
    """A model with random weights, whose experts say something."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3MoeConfig(vocab_size=512, num_experts=4, num_experts_per_tok=2, **sizes, **heads)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter *= 10
    return model


async def said(engine: VLLMEngine) -> list[int]:
    asked = request(PROMPT, temperature=0.0, max_tokens=TOKENS, min_tokens=TOKENS)
    return list((await engine.generate(asked)).token_ids)


async def test_experts_are_those_that_were_published(tmp_path: Path) -> None:
    first, second, third = map(experts, range(3))
    first.save_pretrained(tmp_path / "model")
    settings = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 27}
    engine = VLLMEngine(
        model=str(tmp_path / "model"),
        tokenizer=TINY,
        revision=None,
        engine_args=settings | {"weight_transfer_config": {"backend": "gloo"}},
    )
    await engine.start()
    broadcast = Broadcast(gather_seconds=0.1, seconds=60)
    try:
        assert await said(engine) == greedy_ids(first, PROMPT, TOKENS)
        for version, model in enumerate((first, second), start=1):
            files = tmp_path / f"version-{version}"
            files.mkdir()
            Files().write(model, version=version, dtype=None, target=files)
            await engine.load_weights(str(files), str(version))
            assert await said(engine) == greedy_ids(model, PROMPT, TOKENS)
        broadcast.reach("http://127.0.0.1:80")
        broadcast.write(third, version=3, dtype=None, target=tmp_path)
        await engine.load_weights(broadcast.address(3, str(tmp_path), replicas=1), "3")
        assert await said(engine) == greedy_ids(third, PROMPT, TOKENS)
    finally:
        broadcast.close()
        await engine.shutdown()
