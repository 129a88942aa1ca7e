"""The OpenAI-compatible surface on the real Serve app, called by OpenAI's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.external import open_external
from kuberoll_workers.policy.interface import GenerationRequest, SamplingParameters
from tests.policy.openai_serving import TINY
from tests.serving.hosts import PATIENCE_SECONDS, starting, until_ready

pytestmark = pytest.mark.ray

ANSWER = "<action>up</action>"
USER: Any = [{"role": "user", "content": "1 _\n3 2"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    simulated = {"responses": [ANSWER]}
    app: dict[str, Any] = {
        "tokenizer": str(TINY),
        "engine_args": {"max_model_len": 512},
        "simulated": simulated,
        "replicas": 2,
    }
    with starting(**app) as host:
        yield until_ready(host)[-1]["url"]
        assert host.process.stdin is not None
        host.process.stdin.close()
        host.process.wait(timeout=PATIENCE_SECONDS)


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


async def test_chats_and_streams(client: AsyncOpenAI) -> None:
    tokenizer = HuggingFaceTokenizer.load(str(TINY))
    (model,) = (await client.models.list()).data
    answer = await client.chat.completions.create(
        model=model.id, messages=USER, n=3, extra_body={"return_token_ids": True}
    )
    assert [choice.message.content for choice in answer.choices] == [ANSWER] * 3
    assert (answer.model_extra or {})["prompt_token_ids"] == tokenizer.render_chat(USER).tolist()
    stream = await client.chat.completions.create(model=model.id, messages=USER, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER


async def test_errors(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="none", messages=USER, logit_bias={"1": 2})
    assert caught.value.param == "logit_bias"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="gpt-9", messages=USER)


async def test_both_surfaces_give_the_same_tokens(url: str) -> None:
    request = GenerationRequest(
        request_id="r",
        session_id="s",
        token_ids=token_array([5, 6, 7]),
        sampling=SamplingParameters(max_tokens=20, seed=1, stop=("up",)),
    )
    results = []
    for api in ("Auto", "OpenAI", "KubeRoll"):
        options: dict[str, Any] = {"api": api, "model": None, "api_key": None, "limit": 2}
        async with open_external([url], **options) as (external,):
            assert (await external.wait_ready(30)).max_model_len == 512
            results.append(await external.generate(request))
    async with ServeClient(url, limit=1) as direct:
        results.append(await direct.generate(request))
    assert all(result == results[0] for result in results)
