"""LoRA adapters as weights of the real engine, on this machine's CPU."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from kuberoll.trainer import Adapters, UnusableWeights
from kuberoll.trainer.transports import describe
from kuberoll_workers.policy.interface import GenerationResult
from kuberoll_workers.serving.engines.interface import WeightsRefused
from kuberoll_workers.serving.engines.vllm_engine import VLLMEngine
from kuberoll_workers.serving.openai_api.continuation import ChatMemory, Texts
from kuberoll_workers.serving.openai_api.exact_client import ExactClient
from tests.serving.stepped_model import greedy_ids
from tests.serving.test_vllm import TINY, request

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

RANK = 8
# Longer than two blocks of the prefix cache.
PROMPT = list(range(5, 85))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VLLMEngine]:
    settings = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 27}
    lora = {"enable_lora": True, "max_lora_rank": RANK}
    made = VLLMEngine(model=TINY, tokenizer=TINY, revision=None, engine_args={**settings, **lora})
    await made.start()
    try:
        yield made
    finally:
        await made.shutdown()


def adapted(seed: int, rank: int = RANK) -> Any:
    """The model with an adapter that changes what it says."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    model = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    made = peft.get_peft_model(
        model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
    return made


def published(model: Any, place: Path, version: int) -> str:
    """The adapter as a trainer publishes it."""
    target = place / f"version-{version}"
    target.mkdir()
    describe(Adapters().write(model, version=version, dtype=None, target=target), target)
    return str(target)


def offline(model: Any, count: int) -> list[int]:
    """What the model says, by transformers, with the adapter merged into it."""
    merged = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    return greedy_ids(merged, PROMPT, count)


async def said(engine: VLLMEngine, count: int = 24) -> GenerationResult:
    return await engine.generate(request(PROMPT, temperature=0.0, max_tokens=count, min_tokens=count))


async def answered(client: Any, name: str) -> list[int]:
    """What vLLM's own client answers, which agents' requests go through; every token has the version."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=24, min_tokens=24, temperature=0.0)
    outputs = [output async for output in client.generate({"prompt_token_ids": PROMPT}, parameters, f"agent-{name}")]
    (last,) = outputs[-1].outputs
    assert [(span.version, span.start, span.end) for span in last.weight_versions] == [(name, 0, 24)]
    return list(last.token_ids)


async def test_every_version_of_an_adapter_says_what_its_merged_model_says(engine: VLLMEngine, tmp_path: Path) -> None:
    own = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    plain = await said(engine)
    assert (list(plain.token_ids), plain.policy_versions) == (offline(own, 24), (("0", 0, 24),))
    answers = [list(plain.token_ids)]
    for version in (1, 2, 3):
        model = adapted(version)
        await engine.load_weights(published(model, tmp_path, version), str(version))
        first, again = await said(engine), await said(engine)
        assert list(first.token_ids) == offline(model, 24)
        assert first.policy_versions == ((str(version), 0, 24),)
        # Nothing that another version computed was continued, and what this one did is.
        assert first.cached_tokens == 0
        assert again.cached_tokens > 0
        assert again.token_ids == first.token_ids
        # Agents' requests are of vLLM's own client.
        assert await answered(await engine.open_client(), str(version)) == list(first.token_ids)
        answers.append(list(first.token_ids))
    assert len(set(map(tuple, answers))) == 4
    # Back to an older one, and to none.
    await engine.load_weights(str(tmp_path / "version-2"), "2")
    assert list((await said(engine)).token_ids) == answers[2]
    assert engine.info().policy_version == "2"
    await engine.load_weights(None, "0")
    back = await said(engine)
    assert (list(back.token_ids), back.policy_versions) == (answers[0], (("0", 0, 24),))


async def test_a_request_in_flight_is_finished_with_the_adapter_that_it_began_with(
    engine: VLLMEngine, tmp_path: Path
) -> None:
    old, new = adapted(4), adapted(5)
    await engine.load_weights(published(old, tmp_path, 4), "4")
    task = asyncio.create_task(said(engine, 300))
    while engine.info().tokens_in_flight < 10:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    await engine.load_weights(published(new, tmp_path, 5), "5")
    assert not task.done()
    later = await said(engine, 20)
    assert (list(later.token_ids), later.policy_versions) == (offline(new, 20), (("5", 0, 20),))
    begun = await task
    assert begun.policy_versions == (("4", 0, 300),)
    assert list(begun.token_ids[:20]) == offline(old, 20)


async def test_adapters_that_cannot_be_used_change_nothing(engine: VLLMEngine, tmp_path: Path) -> None:
    good = adapted(6)
    await engine.load_weights(published(good, tmp_path, 6), "6")
    with pytest.raises(WeightsRefused, match="max_lora_rank"):
        await engine.load_weights(published(adapted(7, rank=2 * RANK), tmp_path, 7), "7")
    torn = Path(published(good, tmp_path, 8)) / "adapter_model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-10])
    with pytest.raises(WeightsRefused, match="was it written completely"):
        await engine.load_weights(str(torn.parent), "8")
    assert list((await said(engine)).token_ids) == offline(good, 24)
    # An adapter is one of the model's own weights.
    await engine.load_weights(TINY, "9")
    assert (await said(engine)).policy_versions == (("9", 0, 24),)
    with pytest.raises(WeightsRefused, match="return to version 0 first"):
        await engine.load_weights(str(tmp_path / "version-6"), "10")
    await engine.check_health()
    plain = VLLMEngine(model=TINY, tokenizer=TINY, revision=None, engine_args={})
    with pytest.raises(WeightsRefused, match="is an adapter: set"):
        await plain._load_adapter(tmp_path / "version-6", "1")


async def test_a_request_for_scores_of_prompts_does_not_end_the_engine(engine: VLLMEngine) -> None:
    """On CPUs with adapters vLLM's process dies of one, which anybody may send."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    memory = ChatMemory(
        Texts(decode=lambda _: "", encode=lambda _: array("i"), end=None, read=lambda text, *_: (text, []))
    )
    client = ExactClient(await engine.open_client(), engine, memory)
    outputs = client.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1, prompt_logprobs=1), "scores")
    with pytest.raises(VLLMValidationError, match="prompt_logprobs: vLLM has none on CPUs"):
        await anext(outputs)
    assert (await said(engine)).token_ids
    await engine.check_health()


async def test_adapters_come_with_their_description(tmp_path: Path) -> None:
    model = adapted(1)
    state = {"base_model.model.x.lora_A.weight": torch.zeros(2, 3)}
    with pytest.raises(UnusableWeights, match="Adapters\\(config"):
        Adapters().write(state, version=1, dtype=None, target=tmp_path)
    with pytest.raises(UnusableWeights, match=r"has no adapter_config\.json"):
        Adapters().write(tmp_path, version=1, dtype=None, target=tmp_path)
    for number, (weights, config) in enumerate(((model, None), (state, {"r": 2}))):
        target = tmp_path / str(number)
        target.mkdir()
        Adapters(config).write(weights, version=1, dtype=None, target=target)
        assert {file.name for file in target.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
