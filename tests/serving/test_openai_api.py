"""The OpenAI-compatible surface, called by OpenAI's own client."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    GenerationResult,
    PolicyUnavailable,
    StructuredOutputs,
)
from kuberoll_workers.serving.engines.simulated import Simulated
from tests.policy.openai_serving import TINY, openai_client, serving_openai, tokenizer_with_ends

WINDOW = 512
ANSWER = "<action>up</action>"


class Scripted(Simulated):
    """Answers with the given ids, and keeps what it was asked."""

    def __init__(self, *answers: list[int]) -> None:
        super().__init__(
            model="none",
            tokenizer=str(TINY),
            settings=SimulatedEngine.model_validate({"responses": [ANSWER]}),
            engine_args={"max_model_len": WINDOW},
        )
        self.requests: list[GenerationRequest] = []
        self._answers = list(answers)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        if not self._answers:
            return await super().generate(request)
        ids = token_array(self._answers.pop(0))
        return GenerationResult(
            token_ids=ids,
            logprobs=array("f", [-0.5] * len(ids)),
            finish_reason="stop",
            cached_tokens=3,
            policy_versions=(("7", 0, len(ids)),),
        )


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(str(TINY))


@pytest.fixture(scope="module")
def with_ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_with_ends(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def engine() -> Scripted:
    made = Scripted()
    await made.start()
    return made


@pytest.fixture
async def client(engine: Scripted) -> AsyncIterator[AsyncOpenAI]:
    async with serving_openai(engine) as url, openai_client(url) as made:
        yield made


USER: Any = [{"role": "user", "content": "1 _\n3 2"}]


async def test_a_chat(client: AsyncOpenAI, engine: Scripted, tokenizer: HuggingFaceTokenizer) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=USER, seed=3, max_completion_tokens=40, temperature=0.5, top_p=0.9, logprobs=True
    )
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    prompt = tokenizer.render_chat(USER)
    (asked,) = engine.requests
    assert asked.token_ids == prompt
    assert (asked.sampling.max_tokens, asked.sampling.seed) == (40, 3)
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.5, 0.9, -1)
    assert answer.usage is not None
    generated = tokenizer.encode(ANSWER)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(generated))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(item.token for item in logprobs.content) == ANSWER
    assert all(bytes(item.bytes or ()).decode() == item.token for item in logprobs.content)
    # Not asked for.
    assert "prompt_token_ids" not in (answer.model_extra or {})


async def test_token_ids_come_on_request(client: AsyncOpenAI, engine: Scripted) -> None:
    engine._answers = [[355, 1]]
    answer = await client.chat.completions.create(model="tiny", messages=USER, extra_body={"return_token_ids": True})
    assert (answer.model_extra or {})["prompt_token_ids"] == engine.requests[0].token_ids.tolist()
    assert (answer.choices[0].model_extra or {}) == {"token_ids": [355, 1], "policy_versions": [["7", 0, 2]]}
    assert answer.choices[0].message.content == "up"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_later_turns_begin_with_what_was_sampled(with_ends: Path, tokenizer: HuggingFaceTokenizer) -> None:
    letters = [*tokenizer.encode("u"), *tokenizer.encode("p"), 1]
    assert tokenizer.encode("up").tolist() == [355]
    engine = Scripted(letters, [355, 1], letters[:2])
    await engine.start()
    async with serving_openai(engine, with_ends) as url, openai_client(url) as client:
        messages: list[Any] = [*USER]
        turns = []
        for said in ("and now?", "and then?", "well"):
            answer = await client.chat.completions.create(
                model="tiny", messages=messages, extra_body={"return_token_ids": True}
            )
            ids = (answer.model_extra or {})["prompt_token_ids"]
            turns.append((ids, (answer.choices[0].model_extra or {})["token_ids"]))
            assert answer.choices[0].message.content == "up"
            messages += [answer.choices[0].message, {"role": "user", "content": said}]
        for (prompt, response), (following, _) in itertools.pairwise(turns):
            assert following[: len(prompt) + len(response)] == prompt + response
        # What was not generated here is encoded like any text, and the text is the same either way.
        foreign = await client.chat.completions.create(
            model="tiny", messages=messages, extra_body={"return_token_ids": True}, extra_headers={"x-session-id": "x"}
        )
        ids = (foreign.model_extra or {})["prompt_token_ids"]
        assert ids.count(355) == 3
        # The third response was cut off before its end, which the template writes all the same.
        last = await client.chat.completions.create(
            model="tiny", messages=messages, extra_body={"return_token_ids": True}
        )
        prompt, response = turns[-1]
        again = (last.model_extra or {})["prompt_token_ids"]
        assert again[: len(prompt) + len(response)] == prompt + response
        assert again[len(prompt) + len(response)] == 1
    assert len({request.session_id for request in engine.requests}) == 2


async def test_tools_and_tool_calls_are_rendered(with_ends: Path, tokenizer: HuggingFaceTokenizer) -> None:
    engine = Scripted()
    await engine.start()
    async with serving_openai(engine, with_ends) as url, openai_client(url) as client:
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": [1, 2]}'}}
        messages: list[Any] = [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        await client.chat.completions.create(
            model="tiny", messages=messages, tools=[{"type": "function", "function": {"name": "look"}}]
        )
        messages[1]["tool_calls"][0]["function"]["arguments"] = "{"
        with pytest.raises(openai.BadRequestError, match=r"messages\[1\]\.tool_calls\[0\]"):
            await client.chat.completions.create(model="tiny", messages=messages)
    expected = '<|begin|>look;<|user|>ab<|end|><|assistant|>look {"at": [1, 2]}<|end|><|assistant|>'
    assert engine.requests[0].token_ids == tokenizer.encode(expected)


async def test_tools_that_the_template_leaves_out_are_refused(client: AsyncOpenAI, engine: Scripted) -> None:
    messages: list[Any] = [HELLO]
    tools: list[Any] = [{"type": "function", "function": {"name": "look"}}]
    with pytest.raises(openai.BadRequestError, match="tools: the model's chat template leaves them out") as refused:
        await client.chat.completions.create(model="tiny", messages=messages, tools=tools)
    assert refused.value.param == "tools"
    assert engine.requests == []
    await client.chat.completions.create(model="tiny", messages=messages, tools=[])


async def test_prompts_in_all_their_forms(
    client: AsyncOpenAI, engine: Scripted, tokenizer: HuggingFaceTokenizer
) -> None:
    for prompt, expected in (
        ("0 1", [tokenizer.encode("0 1").tolist()]),
        (["0 1", "2"], [tokenizer.encode("0 1").tolist(), tokenizer.encode("2").tolist()]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ):
        engine.requests.clear()
        given: Any = prompt
        answer = await client.completions.create(
            model="tiny", prompt=given, n=2, seed=7, max_tokens=3, extra_body={"return_token_ids": True}
        )
        assert [request.token_ids.tolist() for request in engine.requests] == [ids for ids in expected for _ in "ab"]
        assert [request.sampling.seed for request in engine.requests] == [7, 8] * len(expected)
        assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
        extra = [choice.model_extra or {} for choice in answer.choices]
        assert [item["prompt_token_ids"] for item in extra] == [ids for ids in expected for _ in "ab"]
        assert [choice.text for choice in answer.choices] == [tokenizer.decode(item["token_ids"]) for item in extra]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, expected))
        assert answer.usage.completion_tokens == sum(len(item["token_ids"]) for item in extra)


async def test_logprobs_of_completions(client: AsyncOpenAI, engine: Scripted) -> None:
    engine._answers = [[355, 7, 1], [355, 7, 1]]
    answer = await client.completions.create(model="tiny", prompt="x", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["up", "!", "<|end|>"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.text_offset == [0, 2, 3]
    answer = await client.completions.create(
        model="tiny", prompt="x", logprobs=0, extra_body={"return_tokens_as_token_ids": True}
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["token_id:355", "token_id:7", "token_id:1"]


async def test_stop_strings_are_cut_off_unless_they_are_wanted(client: AsyncOpenAI) -> None:
    ids = []
    for included, expected in ((False, "<action>"), (True, "<action>up")):
        answer = await client.completions.create(
            model="tiny",
            prompt="x",
            stop="up",
            max_tokens=30,
            extra_body={"include_stop_str_in_output": included, "return_token_ids": True},
        )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
        ids.append((answer.choices[0].model_extra or {})["token_ids"])
    # The tokens are what was sampled either way.
    assert ids[0] == ids[1]


async def test_streams(client: AsyncOpenAI, tokenizer: HuggingFaceTokenizer) -> None:
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="tiny",
            messages=USER,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    ]
    assert (chunks[0].model_extra or {})["prompt_token_ids"] == tokenizer.render_chat(USER).tolist()
    texts = {0: "", 1: ""}
    ends = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason is not None:
            ends[choice.index] = choice.finish_reason
    assert texts == {0: ANSWER, 1: ANSWER}
    assert ends == {0: "stop", 1: "stop"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * len(tokenizer.encode(ANSWER))
    stream = await client.completions.create(model="tiny", prompt="x", stream=True, max_tokens=40)
    assert [chunk.choices[0].text async for chunk in stream] == [ANSWER]


async def test_models(client: AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert (model.id, model.owned_by, (model.model_extra or {})["max_model_len"]) == ("tiny", "kuberoll", WINDOW)
    assert await client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt")


BAD = [
    ({"temperature": "hot"}, "temperature", "Expected `float"),
    ({"temperature": -1}, "temperature", ">= 0"),
    ({"top_p": 0}, "top_p", "> 0"),
    ({"n": 200}, "n", "<= 128"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"stop": [""]}, "stop[0]", "length >= 1"),
    ({"top_logprobs": 2, "logprobs": True}, "top_logprobs", "only that of the sampled token"),
    ({"frequency_penalty": 3}, "frequency_penalty", "<= 2.0"),
    ({"logit_bias": {"1": 2}}, "logit_bias", "not supported"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "set one of json, regex"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "unknown field `regexp`"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "Invalid enum value 'yaml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "send one of them",
    ),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "only parts of type text",
    ),
    ({"messages": [{"role": "user", "content": "1 " * 600}]}, "messages", "no room in the model's window of 512"),
]


@pytest.mark.parametrize(("change", "param", "words"), BAD, ids=[f"{n}-{bad[1]}" for n, bad in enumerate(BAD)])
async def test_errors_name_the_field(client: AsyncOpenAI, change: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post(
            "/chat/completions", body={"model": "tiny", "messages": USER, **change}, cast_to=openai.BaseModel
        )
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert words in caught.value.message


async def test_what_means_nothing_is_no_error(client: AsyncOpenAI, engine: Scripted) -> None:
    answer = await client.chat.completions.create(
        model="none",
        messages=USER,
        frequency_penalty=0,
        logit_bias={},
        response_format={"type": "text"},
        tool_choice="auto",
        parallel_tool_calls=True,
        user="somebody",
        store=False,
        extra_body={"top_k": 0, "n": None, "stop": None, "model": None, "session_id": "mine"},
    )
    assert answer.model == "tiny"
    assert engine.requests[0].session_id == "mine"
    assert engine.requests[0].sampling.top_k == -1


SCHEMA = {"type": "object", "required": ["verdict"]}


@pytest.mark.parametrize(
    ("change", "form"),
    [
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, {"regex": "a+"}),
    ],
)
async def test_forms_of_responses_reach_the_engine(
    client: AsyncOpenAI, engine: Scripted, change: dict[str, Any], form: dict[str, Any]
) -> None:
    await client.post("/chat/completions", body={"messages": USER, **change}, cast_to=openai.BaseModel)
    assert engine.requests[0].sampling.structured_outputs == StructuredOutputs(**form)


@pytest.mark.parametrize("prompt", ["", [], [[]], [1, "x"], [-1], [True], [{}]])
async def test_impossible_prompts(client: AsyncOpenAI, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt=prompt)
    assert caught.value.param == "prompt"


async def test_other_errors(engine: Scripted, tmp_path: Path) -> None:
    async with serving_openai(engine) as url, openai_client(url) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(model="gpt-9", prompt="x")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError, match="not JSON"):
            await client.post("/completions", content=b"{", cast_to=openai.BaseModel)
        with pytest.raises(openai.BadRequestError, match="Expected `object`"):
            await client.post("/completions", body=[], cast_to=openai.BaseModel)
        with pytest.raises(openai.APIStatusError, match="send a POST"):
            await client.get("/completions", cast_to=openai.BaseModel)
        with pytest.raises(openai.NotFoundError, match="no such route"):
            await client.get("/embeddings", cast_to=openai.BaseModel)

        async def broken(request: GenerationRequest) -> GenerationResult:
            raise PolicyUnavailable("the engine is dead")

        engine.generate = broken  # type: ignore[method-assign]
        with pytest.raises(openai.InternalServerError, match="the engine is dead") as fallen:
            await client.completions.create(model="tiny", prompt="x", n=3)
        assert fallen.value.status_code == 503
    async with serving_openai(engine, tmp_path) as url, openai_client(url) as client:
        with pytest.raises(openai.InternalServerError, match="cannot be loaded"):
            await client.completions.create(model="tiny", prompt="x")


BOMB = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
HELLO = {"role": "user", "content": "hi"}


async def refused(url: str, body: Any, path: str = "chat/completions", status: int = 400) -> str:
    """The message of a refusal."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/{path}", data=data) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["type"]) == (status, "invalid_request_error"), error
        return str(error["message"])


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "raise_exception", "range", "a b"])
async def test_callers_do_not_write_the_template(with_ends: Path, name: str) -> None:
    engine = Scripted()
    await engine.start()
    async with serving_openai(engine, with_ends) as url:
        body = {"messages": [HELLO], "chat_template_kwargs": {name: BOMB}}
        assert f"chat_template_kwargs.{name}: callers may not set this variable" in await refused(url, body)
        if name == "chat_template":
            # As vLLM's own server has it.
            body = {"messages": [HELLO], "chat_template": BOMB}
            assert "chat_template: " in await refused(url, body)
    assert engine.requests == []


async def test_the_job_s_variables_are_the_default_of_chats(tmp_path: Path) -> None:
    place = tokenizer_with_ends(tmp_path)
    template = place / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ 'thinks' if enable_thinking else '' }}")
    engine = Scripted()
    await engine.start()
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with (
        serving_openai(engine, place, template_variables={"enable_thinking": True}) as url,
        openai_client(url) as client,
    ):
        await client.chat.completions.create(**chat)
        for wanted in (True, False):
            await client.chat.completions.create(
                **chat, extra_body={"chat_template_kwargs": {"enable_thinking": wanted}}
            )
    default, with_it, without = [len(request.token_ids) for request in engine.requests]
    assert default == with_it > without


async def test_sampling_beyond_openai_s_reaches_the_engine(client: AsyncOpenAI, engine: Scripted) -> None:
    settings = {"min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 3}
    await client.completions.create(
        model="tiny", prompt="x", presence_penalty=0.5, frequency_penalty=-0.5, extra_body=settings
    )
    sampling = engine.requests[-1].sampling
    expected = {**settings, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    assert {name: getattr(sampling, name) for name in expected} == expected


async def test_plain_variables_reach_the_template(tmp_path: Path) -> None:
    place = tokenizer_with_ends(tmp_path)
    template = place / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ 'thinks' if enable_thinking else '' }}")
    engine = Scripted()
    await engine.start()
    async with serving_openai(engine, place) as url, openai_client(url) as client:
        for wanted in (True, False):
            await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                extra_body={"chat_template_kwargs": {"enable_thinking": wanted}},
            )
    with_it, without = [len(request.token_ids) for request in engine.requests]
    assert with_it > without


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [HELLO] * 10_001}, "messages"),
        ({"messages": [HELLO], "tools": [{}] * 1001}, "tools"),
        ({"messages": [{"role": "user", "content": "x" * ((4 << 20) + 1)}]}, "4,194,305 characters"),
        ({"messages": [{**HELLO, "tool_calls": 7}]}, "tool_calls: send a list"),
        ({"messages": [{**HELLO, "tool_calls": [{"function": {"arguments": "[" * 5000}}]}]}, "nested too deeply"),
        ({"messages": [{**HELLO, "tool_calls": [{"function": {"arguments": "[" * 9000 + "]" * 9000}}]}]}, ""),
        ({"messages": [HELLO], "guided_json": "y" * 10_000}, "guided_json"),
        (b'{"messages": ' + b"[" * 50_000, "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', ""),
        (b"\xff", "not JSON"),
    ],
)
async def test_what_is_too_much_is_refused_before_anything_is_done_with_it(
    with_ends: Path, body: Any, words: str
) -> None:
    engine = Scripted()
    await engine.start()
    async with serving_openai(engine, with_ends) as url:
        message = await refused(url, body)
        assert words in message
        assert len(message) < 1000
    assert engine.requests == []


async def test_bodies_have_a_largest_size(with_ends: Path) -> None:
    engine = Scripted()
    await engine.start()
    async with serving_openai(engine, with_ends) as url:
        body = {"messages": [{"role": "user", "content": "x" * (17 << 20)}]}
        assert "more than 16,777,216 bytes" in await refused(url, body, status=413)
        too_many = {"prompt": ["x" * 1000] * 129}
        assert "must not exceed 128 sequences" in await refused(url, too_many, "completions")


async def test_arguments_nested_as_deep_as_json_may_be_are_no_error_of_the_server(with_ends: Path) -> None:
    engine = Scripted()
    await engine.start()
    async with serving_openai(engine, with_ends) as url, aiohttp.ClientSession() as session:
        for depth in (10, 100, 500, 900, 990, 2000, 20_000):
            call = {"function": {"name": "f", "arguments": "[" * depth + "]" * depth}}
            body = {"messages": [{**HELLO, "tool_calls": [call]}]}
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert answer.status in (200, 400), depth
