"""The self-check of vLLM itself, with a fault of its own on this machine's CPU."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.serving.engines.self_check import TEXTS, SelfCheckFailed
from kuberoll_workers.serving.engines.spot_check import SpotChecks
from kuberoll_workers.serving.engines.vllm_engine import VLLMEngine
from tests.serving.test_vllm import request

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


async def failure_during_a_run(engine: VLLMEngine) -> str:
    """Generate until the engine may not be used any more; say why."""
    tokenizer = HuggingFaceTokenizer.load(TINY)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    for number in range(40):
        # One in flight is aborted.
        with contextlib.suppress(PolicyUnavailable):
            await engine.generate(request(prompts[number % 4], temperature=1.0, max_tokens=32, seed=number))
        try:
            engine.check_usable()
        except PolicyUnavailable as error:
            return str(error)
    return ""


async def test_garbage_that_begins_during_a_run_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sound(*_: Any, **__: Any) -> None:
        return None

    engine = made()
    # As if the fault had not been there at the start.
    monkeypatch.setattr(engine, "_prove", sound)
    try:
        await engine.start()
        monkeypatch.setattr(engine, "_spots", SpotChecks(longest=511, share=1.0))
        assert "samples tokens that are impossible" in await failure_during_a_run(engine)
        with pytest.raises(PolicyUnavailable, match="speculative_config"):
            await engine.check_health()
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
