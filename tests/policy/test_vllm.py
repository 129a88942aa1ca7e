"""The real engine, vLLM on this machine's CPU."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy.engines.vllm_engine import VLLMEngine
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    PolicyRefused,
    PolicyUnavailable,
    SamplingParameters,
)

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TINY = str(Path(__file__).parents[2] / "examples" / "models" / "tiny-policy")
WINDOW = 512


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VLLMEngine]:
    made = VLLMEngine(
        model=TINY,
        tokenizer=TINY,
        revision=None,
        engine_args={"dtype": "float32", "max_model_len": WINDOW, "kv_cache_memory_bytes": 1 << 27},
    )
    await made.start()
    try:
        yield made
    finally:
        await made.shutdown()


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(TINY)


PROMPT = [{"role": "user", "content": "The board is:\n1 _\n3 2\n"}]


def request(ids: Iterable[int], name: str = "r", **sampling: object) -> GenerationRequest:
    values: dict[str, Any] = {"max_tokens": 24, "seed": 1, **sampling}
    return GenerationRequest(
        request_id=name, session_id=name, token_ids=token_array(ids), sampling=SamplingParameters(**values)
    )


async def test_a_seed_reproduces_in_any_company(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer) -> None:
    prompt = tokenizer.render_chat(PROMPT)
    alone = await engine.generate(request(prompt, temperature=2.0))
    crowd = await asyncio.gather(*(engine.generate(request(prompt, seed=n, temperature=2.0)) for n in range(16)))
    assert crowd[1].token_ids == alone.token_ids
    assert crowd[1].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len({tuple(result.token_ids) for result in crowd}) > 4


async def test_stop_strings_belong_to_one_request(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer) -> None:
    prompt = tokenizer.render_chat(PROMPT)
    # Hot, so that some response holds a space early on; the same seeds with and without stopping at it.
    free = await asyncio.gather(*(engine.generate(request(prompt, seed=n, temperature=2.0)) for n in range(8)))
    stopped = await asyncio.gather(
        *(engine.generate(request(prompt, seed=n, temperature=2.0, stop=("e",) if n % 2 else ())) for n in range(8))
    )
    for number, (without, with_stop) in enumerate(zip(free, stopped, strict=True)):
        if number % 2 == 0:
            assert with_stop.token_ids == without.token_ids
            continue
        assert without.token_ids[: len(with_stop.token_ids)] == with_stop.token_ids
        text = tokenizer.decode(with_stop.token_ids)
        if with_stop.finish_reason == "stop" and "e" in text:
            # Included, and nothing after the token that completed it.
            assert "e" not in tokenizer.decode(with_stop.token_ids[:-1])
        assert len(with_stop.logprobs) == len(with_stop.token_ids)


async def test_the_prefix_of_the_next_turn_is_cached(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer) -> None:
    prompt = tokenizer.encode("0 1 2 3 4 5 6 7 8 9 " * 10)
    first = await engine.generate(request(prompt))
    second = await engine.generate(request([*prompt, *first.token_ids, 5, 6, 7]))
    assert second.cached_tokens >= len(prompt) // 32 * 32


async def test_the_window(engine: VLLMEngine) -> None:
    result = await engine.generate(request([5] * (WINDOW - 3), temperature=0.0))
    assert len(result.token_ids) <= 3
    result = await engine.generate(request([5] * WINDOW))
    assert (list(result.token_ids), result.finish_reason) == ([], "length")
    with pytest.raises(PolicyRefused, match=f"{WINDOW + 1} tokens, the engine's window {WINDOW}"):
        await engine.generate(request([5] * (WINDOW + 1)))


async def test_seeded_prompts_of_more_than_one_batch(engine: VLLMEngine) -> None:
    # Together more tokens than the scheduler takes in a step: in chunks, seeded prompts would kill this engine.
    prompts = [[5 + n % 7] * (WINDOW - 20) for n in range(24)]
    results = await asyncio.gather(*(engine.generate(request(ids, seed=n)) for n, ids in enumerate(prompts)))
    assert all(len(result.token_ids) == len(result.logprobs) > 0 for result in results)
    await engine.check_health()


async def test_impossible_requests_are_refused_and_harm_nobody(engine: VLLMEngine) -> None:
    with pytest.raises(PolicyRefused):
        await engine.generate(request([1, 99_999]))
    assert len((await engine.generate(request([1, 2], max_tokens=1))).token_ids) == 1


async def test_a_cancelled_request_leaves_the_engine(engine: VLLMEngine) -> None:
    tasks = [
        asyncio.create_task(engine.generate(request([5, 6, 7], name=str(n), max_tokens=500, temperature=2.0)))
        for n in range(4)
    ]
    async with asyncio.timeout(60):
        while engine.info().ongoing_requests < len(tasks):  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while engine.info().ongoing_requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await engine.check_health()


async def test_a_dead_engine_says_so(engine: VLLMEngine) -> None:
    # The last test: nothing works after it.
    await engine.check_health()
    for child in psutil.Process(os.getpid()).children():
        if "EngineCore" in " ".join(child.cmdline()) or "EngineCore" in child.name():
            child.send_signal(signal.SIGKILL)
    with pytest.raises(PolicyUnavailable):
        await _check_until_it_fails(engine)
    with pytest.raises(PolicyUnavailable):
        await engine.generate(request([1, 2]))


async def _check_until_it_fails(engine: VLLMEngine) -> None:
    async with asyncio.timeout(60):
        while True:
            await engine.check_health()
            await asyncio.sleep(0.05)
