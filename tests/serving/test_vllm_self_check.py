"""The self-check of vLLM itself, with a fault of its own on this machine's CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.serving.engines.self_check import SelfCheckFailed
from kuberoll_workers.serving.engines.vllm_engine import VLLMEngine

pytestmark = [pytest.mark.engine, pytest.mark.long]

TINY = str(Path(__file__).parents[2] / "examples" / "models" / "tiny-policy")
# vLLM's sampler of what n-grams propose draws uniformly on CPUs, and says nothing.
GARBAGE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def made(**settings: Any) -> VLLMEngine:
    return VLLMEngine(
        model=TINY,
        tokenizer=TINY,
        revision=None,
        engine_args={
            "dtype": "float32",
            "max_model_len": 512,
            "kv_cache_memory_bytes": 1 << 27,
            "speculative_config": GARBAGE,
        },
        **settings,
    )


async def test_an_engine_that_samples_garbage_does_not_start() -> None:
    engine = made()
    try:
        with pytest.raises(SelfCheckFailed, match="samples tokens that are impossible") as caught:
            await engine.start()
        assert "speculative_config" in str(caught.value)
    finally:
        await engine.shutdown()


async def test_it_starts_where_the_job_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = made(self_check="Warn")
    try:
        await engine.start()
        await engine.check_health()
        assert "samples tokens that are impossible" in caplog.text
    finally:
        await engine.shutdown()
