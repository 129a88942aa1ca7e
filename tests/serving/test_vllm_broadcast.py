"""Weights from a trainer's memory to the real engine, on this machine's CPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from kuberoll.trainer import Broadcast
from kuberoll_workers.policy.interface import GenerationResult
from kuberoll_workers.serving.engines.interface import WeightsRefused
from kuberoll_workers.serving.engines.vllm_engine import VLLMEngine
from tests.rollouts.fakes import until
from tests.serving.stepped_model import greedy_ids, stepped
from tests.serving.test_vllm import TINY, request

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

# Longer than two blocks of the prefix cache.
PROMPT = list(range(5, 85))
TOKENS = 24


@asynccontextmanager
async def running(**arguments: Any) -> AsyncIterator[VLLMEngine]:
    settings = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 27, **arguments}
    made = VLLMEngine(model=TINY, tokenizer=TINY, revision=None, engine_args=settings)
    await made.start()
    try:
        yield made
    finally:
        await made.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VLLMEngine]:
    async with running(weight_transfer_config={"backend": "gloo"}) as made:
        yield made


@pytest.fixture
def broadcast() -> Iterator[Broadcast]:
    made = Broadcast(gather_seconds=0.1, seconds=60)
    made.reach("http://127.0.0.1:80")
    yield made
    made.close()


def greedy(model: Any) -> list[int]:
    return greedy_ids(model, PROMPT, TOKENS)


def offered(broadcast: Broadcast, weights: Any, version: int, files: Path) -> str:
    broadcast.write(weights, version=version, dtype=None, target=files)
    return broadcast.address(version, str(files), replicas=1)


async def said(engine: VLLMEngine, count: int = TOKENS) -> GenerationResult:
    return await engine.generate(request(PROMPT, temperature=0.0, max_tokens=count, min_tokens=count))


async def test_the_engine_says_what_the_published_model_says(
    engine: VLLMEngine, broadcast: Broadcast, tmp_path: Path
) -> None:
    for version in range(1, 4):
        model = stepped(version)
        await engine.load_weights(offered(broadcast, model, version, tmp_path), str(version))
        result = await said(engine)
        assert list(result.token_ids) == greedy(model)
        assert result.policy_versions == ((str(version), 0, TOKENS),)
    # By files, and back.
    await engine.load_weights(None, "0")
    assert list((await said(engine)).token_ids) == greedy(LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32))
    model = stepped(9)
    await engine.load_weights(offered(broadcast, model, 9, tmp_path), "9")
    assert list((await said(engine)).token_ids) == greedy(model)


async def test_a_response_goes_on_with_the_new_weights(
    engine: VLLMEngine, broadcast: Broadcast, tmp_path: Path
) -> None:
    # Made before the response begins, which must not end meanwhile.
    uri = offered(broadcast, stepped(11), 11, tmp_path)
    task = asyncio.create_task(said(engine, 900))
    await until(lambda: engine.info().tokens_in_flight >= 4)
    await engine.load_weights(uri, "11")
    spans = (await task).policy_versions
    assert [version for version, *_ in spans][-1] == "11"
    assert len(spans) == 2


async def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    engine: VLLMEngine, broadcast: Broadcast, tmp_path: Path
) -> None:
    before = await said(engine)
    wrong = {name: value[:1] for name, value in stepped(1).state_dict().items()}
    with pytest.raises(WeightsRefused, match=r"do not fit the model: .* has the shape"):
        await engine.load_weights(offered(broadcast, wrong, 21, tmp_path), "21")
    broadcast.close()
    with pytest.raises(WeightsRefused, match="does not answer"):
        await engine.load_weights(f"trainer://127.0.0.1:1/22?key=x&files={tmp_path}", "22")
    with pytest.raises(WeightsRefused, match="is not a trainer's offer"):
        await engine.load_weights("trainer://127.0.0.1:1/22", "22")
    assert (await said(engine)).token_ids == before.token_ids


@pytest.mark.long
async def test_all_workers_of_a_tensor_parallel_engine_receive(broadcast: Broadcast, tmp_path: Path) -> None:
    settings = {"tensor_parallel_size": 2, "weight_transfer_config": {"backend": "gloo"}}
    async with running(**settings) as engine:
        for version in (1, 2):
            model = stepped(version)
            await engine.load_weights(offered(broadcast, model, version, tmp_path), str(version))
            assert list((await said(engine)).token_ids) == greedy(model)
