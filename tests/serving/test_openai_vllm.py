"""The OpenAI-compatible surface over the real engine, vLLM on this machine's CPU."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy.external import open_external
from kuberoll_workers.policy.interface import GenerationRequest, SamplingParameters
from kuberoll_workers.serving.engines.vllm_engine import VLLMEngine
from tests.policy.openai_serving import TINY, openai_client, serving_openai, tokenizer_with_ends

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VLLMEngine]:
    made = VLLMEngine(
        model=str(TINY),
        tokenizer=str(tokenizer_with_ends(tmp_path_factory.mktemp("tokenizer"))),
        revision=None,
        engine_args={"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 27},
    )
    await made.start()
    try:
        yield made
    finally:
        await made.shutdown()


async def test_a_chat_of_several_turns_is_token_exact(engine: VLLMEngine) -> None:
    messages: list[Any] = [{"role": "user", "content": "The board is:\n1 _\n3 2\n"}]
    turns: list[list[int]] = []
    cached = 0
    async with serving_openai(engine) as url, openai_client(url) as client:
        for turn in range(5):
            # Hot, so that what is sampled is hardly ever what its text would be encoded to.
            answer = await client.chat.completions.create(
                model="tiny",
                messages=messages,
                temperature=2.0,
                seed=turn,
                max_tokens=40,
                logprobs=True,
                extra_body={"return_token_ids": True, "skip_special_tokens": False},
            )
            (choice,) = answer.choices
            prompt = (answer.model_extra or {})["prompt_token_ids"]
            response = (choice.model_extra or {})["token_ids"]
            assert choice.logprobs is not None
            assert len(choice.logprobs.content or ()) == len(response)
            if turns:
                assert prompt[: len(turns[-1])] == turns[-1]
            turns.append(prompt + response)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens or 0
            text = (choice.message.content or "").removesuffix("<|end|>")
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    # Whole blocks of what the last turn began with.
    assert cached >= len(turns[-2]) // 32 * 32 - 32
    tokenizer = HuggingFaceTokenizer.load(str(TINY))
    samples = [ids[len(turns[0]) :] for ids in turns[1:]]
    assert any(tokenizer.encode(tokenizer.decode(ids)).tolist() != ids for ids in samples)


async def test_as_an_external_policy(engine: VLLMEngine) -> None:
    tokenizer = HuggingFaceTokenizer.load(str(TINY))
    prompt = tokenizer.render_chat([{"role": "user", "content": "The board is:\n1 _\n3 2\n"}])
    async with (
        serving_openai(engine) as url,
        open_external([url], api="Auto", model=None, api_key=None, limit=4) as (client,),
    ):
        for seed, stop in ((1, ()), (2, ("e",)), (3, ("<",))):
            request = GenerationRequest(
                request_id="r",
                session_id="s",
                token_ids=prompt,
                sampling=SamplingParameters(max_tokens=24, seed=seed, temperature=2.0, stop=stop),
            )
            there, here = await client.generate(request), await engine.generate(request)
            assert (there.token_ids, there.finish_reason, there.exact) == (here.token_ids, here.finish_reason, True)
            assert there.logprobs == pytest.approx(here.logprobs, abs=1e-4)
            assert there.policy_versions == here.policy_versions
