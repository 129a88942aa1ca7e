"""The simulated engine: the same answer to the same question, whatever else it does."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.interface import GenerationRequest, PolicyRefused, SamplingParameters
from kuberoll_workers.serving.engines.simulated import Simulated

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-policy"


def engine(model: str = "none", **settings: Any) -> Simulated:
    return Simulated(
        model=model,
        tokenizer=model,
        settings=SimulatedEngine.model_validate(settings),
        engine_args={"max_model_len": 100},
    )


def request(
    ids: Sequence[int] = (1, 2, 3), *, name: str = "r", seed: int | None = 5, **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        session_id="s",
        token_ids=token_array(ids),
        sampling=SamplingParameters(**{"max_tokens": 90, "seed": seed, **sampling}),
    )


async def test_seed_and_prompt_decide() -> None:
    simulated = engine(meanTokens=20)
    first = await simulated.generate(request())
    assert await simulated.generate(request(name="other")) == first
    assert await simulated.generate(request(seed=6)) != first
    assert await simulated.generate(request((1, 2))) != first


async def test_without_a_seed_the_request_decides() -> None:
    simulated = engine(meanTokens=20)
    assert await simulated.generate(request(seed=None)) != await simulated.generate(request(seed=None, name="x"))


async def test_random_tokens_are_equally_likely(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    result = await engine(str(tmp_path)).generate(request())
    assert all(0 <= token < 64 for token in result.token_ids)
    assert result.logprobs[0] == pytest.approx(-math.log(64))
    assert len(result.logprobs) == len(result.token_ids)


async def test_limits() -> None:
    simulated = engine(meanTokens=1000)
    result = await simulated.generate(request(max_tokens=7))
    assert (len(result.token_ids), result.finish_reason) == (7, "length")
    result = await simulated.generate(request(range(98)))
    assert (len(result.token_ids), result.finish_reason) == (2, "length")
    assert len((await simulated.generate(request(range(100)))).token_ids) == 0
    with pytest.raises(PolicyRefused, match="101 tokens, the engine's window 100"):
        await simulated.generate(request(range(101)))


async def test_scripted_responses_end_at_their_stop_string() -> None:
    simulated = engine(str(TINY), responses=["<action>up</action> and more"])
    await simulated.start()
    result = await simulated.generate(request(stop=("</action>",)))
    from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer

    assert HuggingFaceTokenizer.load(str(TINY)).decode(result.token_ids) == "<action>up</action>"
    assert result.finish_reason == "stop"


async def test_stop_tokens_and_least_lengths() -> None:
    simulated = engine(meanTokens=20)
    free = (await simulated.generate(request())).token_ids
    assert len(free) > 3
    cut = await simulated.generate(request(stop_token_ids=(free[2],)))
    assert (cut.token_ids, cut.finish_reason) == (free[:3], "stop")
    later = await simulated.generate(request(stop_token_ids=(free[2],), min_tokens=3))
    assert len(later.token_ids) > 3
    short = engine(meanTokens=1)
    assert len((await short.generate(request(min_tokens=30))).token_ids) >= 30
    assert len((await short.generate(request(min_tokens=30, max_tokens=10))).token_ids) == 10


async def test_no_more_than_max_batch_at_once() -> None:
    simulated = engine(maxBatch=3, firstTokenSeconds=0.001)
    most = 0

    async def watched(number: int) -> None:
        nonlocal most
        task = asyncio.ensure_future(simulated.generate(request(seed=number)))
        while not task.done():
            most = max(most, simulated.in_flight)
            await asyncio.sleep(0)
        await task

    await asyncio.gather(*(watched(number) for number in range(20)))
    assert most == 3


async def test_a_cancelled_request_frees_its_place() -> None:
    simulated = engine(maxBatch=1, firstTokenSeconds=600)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await simulated.generate(request())
    assert simulated.in_flight == 0
