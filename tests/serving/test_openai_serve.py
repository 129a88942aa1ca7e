"""vLLM's API on the real Serve app, called by the clients of OpenAI and Anthropic and by an agent of OpenAI's SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import agents
import aiohttp
import anthropic
import openai
import pytest
from openai import AsyncOpenAI

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.external import open_external
from kuberoll_workers.policy.interface import GenerationRequest, SamplingParameters
from tests.policy.openai_serving import tokenizer_with_ends
from tests.serving.hosts import PATIENCE_SECONDS, TOKENS, starting, until_ready

pytestmark = pytest.mark.ray

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
USER: Any = [{"role": "user", "content": "1 _\n3 2"}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_with_ends(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def url(place: Path) -> Iterator[str]:
    app: dict[str, Any] = {
        "tokenizer": str(place),
        "engine_args": {"max_model_len": 2048},
        "simulated": {"responses": [CALL]},
        "tool_call_parser": "hermes",
        "replicas": 2,
    }
    with starting(tokens=TOKENS, torch=True, **app) as host:
        yield until_ready(host)[-1]["url"]
        assert host.process.stdin is not None
        host.process.stdin.close()
        host.process.wait(timeout=PATIENCE_SECONDS)


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKENS.generate, max_retries=0, timeout=120) as made:
        yield made


async def test_chats_and_streams(client: AsyncOpenAI, place: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(str(place))
    model = (await client.models.list()).data[0]
    answer = await client.chat.completions.create(
        model=model.id, messages=USER, n=3, extra_body={"return_token_ids": True}
    )
    assert [choice.message.content for choice in answer.choices] == [CALL] * 3
    assert (answer.model_extra or {})["prompt_token_ids"] == tokenizer.render_chat(USER).tolist()
    stream = await client.chat.completions.create(model=model.id, messages=USER, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == CALL
    assert len(pieces) > len(tokenizer.encode(CALL))


async def test_errors(client: AsyncOpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="none", messages=USER, extra_body={"best_of": 2})
    assert caught.value.param == "best_of"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="gpt-9", messages=USER)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKENS.read, max_retries=0) as reader:
        assert (await reader.models.list()).data
        with pytest.raises(openai.PermissionDeniedError, match="scope generate"):
            await reader.chat.completions.create(model="none", messages=USER)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_anthropic_s_clients_authenticate_their_own_way(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key=TOKENS.generate, max_retries=0) as claude:
        tool: Any = {"name": "multiply", "input_schema": {"type": "object", "properties": {}}}
        answer = await claude.messages.create(model="none", max_tokens=200, messages=USER, tools=[tool])
        (block,) = answer.content
        assert block.type == "tool_use"
        assert (block.name, block.input) == ("multiply", {"a": 6, "b": 7})
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(model="none", max_tokens=200, messages=USER)


@pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
async def test_an_agent_of_openai_s_sdk_calls_its_tool(client: AsyncOpenAI, kind: Any) -> None:
    made: list[tuple[int, int]] = []

    @agents.function_tool
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        made.append((a, b))
        return a * b

    agents.set_tracing_disabled(True)
    agent = agents.Agent(
        name="calculator",
        instructions="Use the tool.",
        tools=[multiply],
        model=kind(model="none", openai_client=client),
        # The policy only ever writes this call: its result is the answer.
        tool_use_behavior="stop_on_first_tool",
    )
    result = await agents.Runner.run(agent, "6 times 7?")
    assert made == [(6, 7)]
    assert int(result.final_output) == 42


async def test_an_agent_s_session_is_captured_on_its_replica(url: str, place: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(str(place))

    @agents.function_tool
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    headers = {"Authorization": f"Bearer {TOKENS.generate}"}
    agents.set_tracing_disabled(True)
    addresses = set()
    # Idle connections that the server closes may just be used again.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as http:
        for _ in range(8):
            async with http.post(f"{url}/sessions") as answer:
                assert answer.status == 201, await answer.text()
                session = await answer.json()
            addresses.add(session["url"].partition("/sessions")[0])
            async with AsyncOpenAI(
                base_url=session["openai_base_url"], api_key=session["token"], max_retries=0, timeout=120
            ) as client:
                agent = agents.Agent(
                    name="calculator",
                    instructions="Use the tool.",
                    tools=[multiply],
                    model=agents.OpenAIChatCompletionsModel(model="none", openai_client=client),
                )
                # The policy writes the same call for ever.
                with pytest.raises(agents.MaxTurnsExceeded):
                    await agents.Runner.run(agent, "6 times 7?", max_turns=3)
                with pytest.raises(openai.AuthenticationError):
                    await client.with_options(base_url=f"{url}/v1").models.list()
            async with http.delete(session["url"]) as answer:
                closed = await answer.json()
            (trajectory,) = closed["trajectories"]
            assert [item["role"] for item in trajectory["messages"]] == ["context", "assistant"] * 3
            assert closed["continuity"] == {"new": 1, "realigned": 2}
            assert {item["content"] for item in trajectory["messages"][1::2]} == {CALL}
            assert "<|tool|>42<|end|>" in trajectory["messages"][2]["content"]
            whole = [token for item in trajectory["messages"] for token in item["token_ids"]]
            assert tokenizer.decode_with_special_tokens(whole).count(CALL) == 3
    # Those of the replicas, not that of the proxy.
    assert url not in addresses


async def test_a_chat_goes_on_exactly_on_the_replica_of_its_session(client: AsyncOpenAI) -> None:
    async def play(session: str) -> None:
        messages = [*USER]
        known: list[int] = []
        for _ in range(4):
            answer = await client.chat.completions.create(
                model="none",
                messages=messages,
                tools=[{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}],
                extra_body={"return_token_ids": True},
                extra_headers={"x-session-id": session},
            )
            (choice,) = answer.choices
            prompt = (answer.model_extra or {})["prompt_token_ids"]
            assert prompt[: len(known)] == known
            known = prompt + (choice.model_extra or {})["token_ids"]
            (call,) = choice.message.tool_calls or []
            assert call.type == "function"
            assert json.loads(call.function.arguments) == {"a": 6, "b": 7}
            messages += [
                choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
                {"role": "tool", "tool_call_id": call.id, "content": "42"},
            ]

    await asyncio.gather(*(play(f"episode-{number}") for number in range(16)))


async def test_both_surfaces_give_the_same_tokens(url: str) -> None:
    request = GenerationRequest(
        request_id="r",
        session_id="s",
        token_ids=token_array([5, 6, 7]),
        sampling=SamplingParameters(max_tokens=20, seed=1, stop=("arg",)),
    )
    results = []
    for api in ("Auto", "OpenAI", "KubeRoll"):
        options: dict[str, Any] = {"api": api, "model": None, "api_key": TOKENS.generate, "limit": 2}
        async with open_external([url], **options) as (external,):
            assert (await external.wait_ready(30)).max_model_len == 2048
            results.append(await external.generate(request))
    async with ServeClient(url, limit=1, token=TOKENS.generate) as direct:
        results.append(await direct.generate(request))
    assert all(result == results[0] for result in results)
