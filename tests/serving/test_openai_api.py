"""vLLM's API around a simulated engine, called by the clients of OpenAI and Anthropic; no model is started."""

from __future__ import annotations

import asyncio
import itertools
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, PolicyUnavailable
from kuberoll_workers.serving.engines.simulated import Simulated
from tests.policy.openai_serving import TINY, openai_client, serving_openai, tokenizer_with_ends

pytestmark = pytest.mark.slow

WINDOW = 512
ANSWER = "<action>up</action>"
END = 1


class Scripted(Simulated):
    """Answers with the given ids, and keeps what it was asked."""

    def __init__(self, *answers: list[int], tokenizer: Path = TINY, window: int = WINDOW) -> None:
        super().__init__(
            model="none",
            tokenizer=str(tokenizer),
            settings=SimulatedEngine.model_validate({"responses": [ANSWER]}),
            engine_args={"max_model_len": window},
        )
        self.requests: list[GenerationRequest] = []
        self.answers = list(answers)
        self.broken = ""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        if not self.answers:
            return await super().generate(request)
        ids = token_array(self.answers.pop(0))
        return GenerationResult(
            token_ids=ids,
            logprobs=array("f", [-0.5] * len(ids)),
            finish_reason="stop",
            cached_tokens=3,
            policy_versions=(("7", 0, len(ids)),),
        )

    def check_usable(self) -> None:
        if self.broken:
            raise PolicyUnavailable(self.broken)


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(str(TINY))


@pytest.fixture(scope="module")
def with_ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_with_ends(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def engine() -> AsyncIterator[Scripted]:
    made = Scripted()
    await made.start()
    yield made
    await made.shutdown()


@pytest.fixture
async def client(engine: Scripted) -> AsyncIterator[AsyncOpenAI]:
    async with serving_openai(engine) as url, openai_client(url) as made:
        yield made


USER: Any = [{"role": "user", "content": "1 _\n3 2"}]
HELLO = {"role": "user", "content": "hi"}
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
EXACT: Any = {"return_token_ids": True}


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
    assert [item.logprob for item in logprobs.content] == [0.0] * len(generated)
    # Not asked for.
    assert (answer.model_extra or {}).get("prompt_token_ids") is None


async def test_defaults_are_those_of_the_api_and_not_the_model_s(client: AsyncOpenAI, engine: Scripted) -> None:
    await client.chat.completions.create(model="tiny", messages=USER)
    await client.completions.create(model="tiny", prompt="x")
    chat, completion = (request.sampling for request in engine.requests)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.min_p, chat.repetition_penalty) == (1.0, 1.0, -1, 0.0, 1.0)
    assert chat.max_tokens == WINDOW - len(engine.requests[0].token_ids)
    assert completion.max_tokens == 16


async def test_token_ids_and_their_versions_come_on_request(client: AsyncOpenAI, engine: Scripted) -> None:
    engine.answers = [[355, END]]
    answer = await client.chat.completions.create(model="tiny", messages=USER, extra_body=EXACT)
    assert (answer.model_extra or {})["prompt_token_ids"] == engine.requests[0].token_ids.tolist()
    extra = answer.choices[0].model_extra or {}
    assert (extra["token_ids"], extra["policy_versions"]) == ([355, END], [["7", 0, 2]])
    assert answer.choices[0].message.content == "up"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_later_turns_begin_with_what_was_sampled(with_ends: Path, tokenizer: HuggingFaceTokenizer) -> None:
    letters = [*tokenizer.encode("u"), *tokenizer.encode("p"), END]
    assert tokenizer.encode("up").tolist() == [355]
    # What a front end leaves out of the text of a response that was not ended by an end token is nothing here.
    engine = Scripted(letters, [355, END], letters[:2], tokenizer=with_ends)
    await engine.start()
    async with serving_openai(engine) as url, openai_client(url) as client:
        messages: list[Any] = [*USER]
        turns: list[Any] = []
        for said in ("and now?", "and then?", "well"):
            answer = await client.chat.completions.create(model="tiny", messages=messages, extra_body=EXACT)
            ids = (answer.model_extra or {})["prompt_token_ids"]
            continuity = (answer.model_extra or {})["prompt_continuity"]
            assert continuity == ("realigned" if turns else "new")
            turns.append((ids, (answer.choices[0].model_extra or {})["token_ids"]))
            assert answer.choices[0].message.content == "up"
            message = {"role": "assistant", "content": answer.choices[0].message.content}
            messages += [message, {"role": "user", "content": said}]
        for (prompt, response), (following, _) in itertools.pairwise(turns):
            assert following[: len(prompt) + len(response)] == prompt + response
        # What was not generated here is encoded like any text, and the text is the same either way.
        foreign = await client.chat.completions.create(
            model="tiny", messages=messages, extra_body=EXACT, extra_headers={"x-session-id": "x"}
        )
        ids = (foreign.model_extra or {})["prompt_token_ids"]
        assert ids.count(355) == 3
        # The third response was cut off before its end, which the template writes all the same.
        last = await client.chat.completions.create(model="tiny", messages=messages, extra_body=EXACT)
        prompt, response = turns[-1]
        again = (last.model_extra or {})["prompt_token_ids"]
        assert again[: len(prompt) + len(response)] == prompt + response
        assert again[len(prompt) + len(response)] == END
    assert engine.requests[-1].token_ids.tolist() == again
    await engine.shutdown()


async def test_a_tool_s_call_comes_parsed_and_goes_back_as_it_was_sampled(
    with_ends: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    # As no template writes it.
    sampled = 'let me see <tool_call>{"arguments":{"at":  [1,2]},"name":"look"}</tool_call>'
    engine = Scripted([*tokenizer.encode(sampled), END], tokenizer=with_ends)
    await engine.start()
    async with serving_openai(engine, tool_parser="hermes") as url, openai_client(url) as client:
        messages: list[Any] = [HELLO]
        answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[LOOK], extra_body=EXACT)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": [1, 2]})
        assert (choice.message.content or "").strip() == "let me see"
        first = (answer.model_extra or {})["prompt_token_ids"]
        assert tokenizer.decode_with_special_tokens(first).startswith("<|begin|>look;<|user|>hi<|end|>")
        messages += [
            choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
            {"role": "tool", "tool_call_id": call.id, "content": "a wall"},
        ]
        answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[LOOK], extra_body=EXACT)
        second = (answer.model_extra or {})["prompt_token_ids"]
        response = [*tokenizer.encode(sampled), END]
        assert second[: len(first) + len(response)] == first + response
        rest = tokenizer.decode_with_special_tokens(second[len(first) + len(response) :])
        assert rest == "<|tool|>a wall<|end|><|assistant|>"
        # Another call is another chat.
        messages[1]["tool_calls"][0]["function"]["arguments"] = '{"at": [2, 1]}'
        answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[LOOK], extra_body=EXACT)
        assert (answer.model_extra or {})["prompt_token_ids"][: len(first + response)] != first + response
    await engine.shutdown()


async def test_tools_need_a_template_and_a_parser(client: AsyncOpenAI, engine: Scripted, with_ends: Path) -> None:
    chat: Any = {"model": "tiny", "messages": [HELLO], "tools": [LOOK]}
    with pytest.raises(openai.BadRequestError, match="tools: the model's chat template leaves them out") as refused:
        await client.chat.completions.create(**chat)
    assert refused.value.param == "tools"
    other = Scripted(tokenizer=with_ends)
    await other.start()
    async with serving_openai(other) as url, openai_client(url) as second:
        with pytest.raises(openai.BadRequestError, match=r"set spec\.generation\.toolCallParser"):
            await second.chat.completions.create(**chat)
        await second.chat.completions.create(**chat, tool_choice="none")
    assert engine.requests == []
    await other.shutdown()


async def test_an_unknown_parser_is_named(with_ends: Path) -> None:
    engine = Scripted(tokenizer=with_ends)
    await engine.start()
    async with serving_openai(engine, tool_parser="hermse") as url, openai_client(url) as client:
        with pytest.raises(openai.InternalServerError, match="did you mean hermes") as caught:
            await client.completions.create(model="tiny", prompt="x")
        assert caught.value.status_code == 501
    await engine.shutdown()


async def test_reasoning_is_apart_with_its_parser(tmp_path: Path) -> None:
    place = tokenizer_with_ends(tmp_path)
    rust = Tokenizer.from_file(str(place / "tokenizer.json"))
    rust.add_tokens(["<think>", "</think>"])
    rust.save(str(place / "tokenizer.json"))
    engine = Scripted([*rust.encode("<think>hm</think>up", add_special_tokens=False).ids, END], tokenizer=place)
    await engine.start()
    async with serving_openai(engine, reasoning_parser="deepseek_r1") as url, openai_client(url) as client:
        answer = await client.chat.completions.create(model="tiny", messages=USER)
    assert answer.choices[0].message.content == "up"
    assert (answer.choices[0].message.model_extra or {})["reasoning"] == "hm"
    await engine.shutdown()


async def test_the_responses_api(with_ends: Path, tokenizer: HuggingFaceTokenizer) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    engine = Scripted([*tokenizer.encode(call), END], [355, END], tokenizer=with_ends, window=2048)
    await engine.start()
    tool: Any = {
        "type": "function",
        "name": "look",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    }
    async with serving_openai(engine, tool_parser="hermes") as url, openai_client(url) as client:
        given: list[Any] = [{"role": "user", "content": "where?"}]
        answer = await client.responses.create(model="tiny", input=given, tools=[tool], store=False)
        (made,) = [item for item in answer.output if item.type == "function_call"]
        assert (made.name, json.loads(made.arguments)) == ("look", {"at": 1})
        given += [
            made.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": made.call_id, "output": "a wall"},
        ]
        answer = await client.responses.create(model="tiny", input=given, tools=[tool], store=False)
        assert answer.output_text == "up"
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="tiny", input="x", previous_response_id="resp_1")
    first, second = (request.token_ids for request in engine.requests)
    sampled = token_array([*tokenizer.encode(call), END])
    assert second[: len(first) + len(sampled)] == first + sampled
    await engine.shutdown()


async def test_anthropic_s_messages(engine: Scripted) -> None:
    async with (
        serving_openai(engine) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        answer = await client.messages.create(model="tiny", max_tokens=30, messages=[{"role": "user", "content": "hi"}])
        (block,) = answer.content
        assert block.type == "text"
        assert block.text == ANSWER
        count = await client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert count.input_tokens == answer.usage.input_tokens == len(engine.requests[0].token_ids)


async def test_tokenize_and_back(engine: Scripted, tokenizer: HuggingFaceTokenizer) -> None:
    async with serving_openai(engine) as url, aiohttp.ClientSession() as session:
        async with session.post(f"{url}/tokenize", json={"model": "tiny", "messages": USER}) as answer:
            found = await answer.json()
        assert found["tokens"] == tokenizer.render_chat(USER).tolist()
        async with session.post(f"{url}/detokenize", json={"model": "tiny", "tokens": found["tokens"]}) as answer:
            assert (await answer.json())["prompt"] == tokenizer.decode_with_special_tokens(found["tokens"])
    assert engine.requests == []


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
            model="tiny", prompt=given, n=2, seed=7, max_tokens=3, extra_body=EXACT
        )
        # Prompts are generated for concurrently.
        asked = sorted((request.token_ids.tolist(), request.sampling.seed) for request in engine.requests)
        assert asked == sorted((ids, seed) for ids in expected for seed in (7, 8))
        assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
        extra = [choice.model_extra or {} for choice in answer.choices]
        assert [item["prompt_token_ids"] for item in extra] == [ids for ids in expected for _ in "ab"]
        assert [choice.text for choice in answer.choices] == [tokenizer.decode(item["token_ids"]) for item in extra]
        assert all(item["policy_versions"] == [["0", 0, len(item["token_ids"])]] for item in extra)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, expected))
        assert answer.usage.completion_tokens == sum(len(item["token_ids"]) for item in extra)


async def test_logprobs_of_completions(client: AsyncOpenAI, engine: Scripted) -> None:
    engine.answers = [[355, 7, END], [355, 7, END]]
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


async def test_streams_token_by_token(client: AsyncOpenAI, tokenizer: HuggingFaceTokenizer) -> None:
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="tiny", messages=USER, n=2, stream=True, stream_options={"include_usage": True}, extra_body=EXACT
        )
    ]
    assert (chunks[0].model_extra or {})["prompt_token_ids"] == tokenizer.render_chat(USER).tolist()
    texts, ids, ends, versions = {0: "", 1: ""}, {0: [], 1: []}, {}, {}  # type: ignore[var-annotated]
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += (choice.model_extra or {}).get("token_ids") or []
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
                versions[choice.index] = (choice.model_extra or {})["policy_versions"]
    expected = tokenizer.encode(ANSWER).tolist()
    assert texts == {0: ANSWER, 1: ANSWER}
    assert ids == {0: expected, 1: expected}
    assert ends == {0: "stop", 1: "stop"}
    assert versions == {0: [["0", 0, len(expected)]], 1: [["0", 0, len(expected)]]}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * len(expected)
    stream = await client.completions.create(model="tiny", prompt="x", stream=True, max_tokens=40)
    pieces = [chunk.choices[0].text async for chunk in stream]
    assert len(pieces) >= len(expected)
    assert "".join(pieces) == ANSWER


async def test_models(client: AsyncOpenAI) -> None:
    model, source = (await client.models.list()).data
    assert (model.id, source.id, (model.model_extra or {})["max_model_len"]) == ("tiny", "none", WINDOW)
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match=r"gpt-9.*tiny"):
        await client.completions.create(model="gpt-9", prompt="x")


BAD = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 200}, "n: prompts times n must not exceed 128"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "one kind of constraints"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"guided_json": {"type": "object"}}, "guided_json: "),
    ({"use_beam_search": True}, "use_beam_search: True is not supported"),
    ({"logprob_token_ids": [7]}, "logprob_token_ids: [7] is not supported"),
    ({"best_of": 4}, "best_of: 4 is not supported"),
    ({"messages": []}, "empty conversation"),
    ({"messages": [{"content": "x"}]}, "role"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.0.1"}}]}
            ]
        },
        "messages: only parts of type text are supported, not image_url",
    ),
    ({"messages": [{"role": "user", "content": "1 " * 600}]}, "512"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[bad[1][:30] for bad in BAD])
async def test_errors_name_the_field(client: AsyncOpenAI, change: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post(
            "/chat/completions", body={"model": "tiny", "messages": USER, **change}, cast_to=openai.BaseModel
        )
    assert words in f"{caught.value.param}: {caught.value.message}"


async def test_sampling_beyond_openai_s_reaches_the_engine(client: AsyncOpenAI, engine: Scripted) -> None:
    settings = {"min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 3, "stop_token_ids": [9], "session_id": "mine"}
    await client.completions.create(
        model="none", prompt="x", presence_penalty=0.5, frequency_penalty=-0.5, extra_body=settings
    )
    (asked,) = engine.requests
    expected = {**settings, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop_token_ids": (9,)}
    assert expected.pop("session_id") == asked.session_id
    assert {name: getattr(asked.sampling, name) for name in expected} == expected


async def test_other_errors(client: AsyncOpenAI, engine: Scripted) -> None:
    with pytest.raises(openai.BadRequestError, match="not JSON"):
        await client.post("/completions", content=b"{", cast_to=openai.BaseModel)
    with pytest.raises(openai.BadRequestError, match="not a JSON object, but list"):
        await client.post("/completions", body=[], cast_to=openai.BaseModel)
    with pytest.raises(openai.APIStatusError) as caught:
        await client.get("/completions", cast_to=openai.BaseModel)
    assert caught.value.status_code == 405
    with pytest.raises(openai.NotFoundError, match="no such route"):
        await client.get("/embeddings", cast_to=openai.BaseModel)
    engine.broken = "the weights 3 could not be loaded"
    with pytest.raises(openai.InternalServerError, match="the weights 3 could not be loaded") as fallen:
        await client.completions.create(model="tiny", prompt="x", n=3)
    assert fallen.value.status_code == 503


async def test_an_engine_that_fails_is_no_error_of_the_request(client: AsyncOpenAI, engine: Scripted) -> None:
    async def fail(_: GenerationRequest) -> GenerationResult:
        raise PolicyUnavailable("the engine is dead")

    engine.generate = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(openai.InternalServerError, match="the engine ended the request with 'error'") as fallen:
        await client.completions.create(model="tiny", prompt="x")
    assert fallen.value.status_code == 503


async def test_a_tokenizer_that_is_missing_is_named(tmp_path: Path) -> None:
    engine = Scripted(tokenizer=tmp_path)
    async with serving_openai(engine) as url, openai_client(url) as client:
        with pytest.raises(openai.InternalServerError, match="vLLM's API cannot be started") as caught:
            await client.completions.create(model="tiny", prompt="x")
        assert caught.value.status_code == 501
    await engine.shutdown()


BOMB = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"


async def refusal(url: str, body: Any, path: str = "chat/completions", status: int = 400) -> str:
    """The message of a refusal."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/{path}", data=data) as answer,
    ):
        error = (await answer.json())["error"]
        assert answer.status == status, error
        return str(error["message"])


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "raise_exception", "range", "a b"])
async def test_callers_do_not_write_the_template(engine: Scripted, name: str) -> None:
    async with serving_openai(engine) as url:
        body: dict[str, Any] = {"messages": [HELLO], "chat_template_kwargs": {name: BOMB}}
        assert f"chat_template_kwargs.{name}: callers may not set this variable" in await refusal(url, body)
        if name == "chat_template":
            body = {"messages": [HELLO], "chat_template": BOMB}
            assert "chat template" in (await refusal(url, body)).lower()
    assert engine.requests == []


async def test_the_job_s_template_renders_chats_as_in_rollouts(
    engine: Scripted, tokenizer: HuggingFaceTokenizer
) -> None:
    template = (
        "{%- for message in messages %}\n<|{{ message.role }}|>{{ message.content }}<|end|>\n{%- endfor %}\n"
        "{%- for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ mood }}:{% endif %}\n"
    )
    variables = {"mood": "calm"}
    own = tokenizer.with_template(template).with_variables(variables)
    expected = own.render_chat([HELLO]).tolist()
    assert own.decode_with_special_tokens(expected) == "<|user|>hi<|end|><|assistant|>calm:"
    async with (
        serving_openai(engine, chat_template=template, template_variables=variables, tool_parser="hermes") as url,
        openai_client(url) as client,
        aiohttp.ClientSession() as session,
    ):
        async with session.post(f"{url}/tokenize", json={"model": "tiny", "messages": [HELLO]}) as answer:
            assert (await answer.json())["tokens"] == expected
        await client.chat.completions.create(model="tiny", messages=USER)
        await client.responses.create(model="tiny", input="hi")
        # The tokenizer's own template leaves tools out.
        await client.chat.completions.create(model="tiny", messages=USER, tools=[LOOK])
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:
            await claude.messages.create(model="tiny", max_tokens=20, messages=USER)
    plain, text, tools, claude_s = [request.token_ids for request in engine.requests]
    assert plain == claude_s == own.render_chat(USER)
    assert text.tolist() == expected
    assert tools == own.render_chat(USER, tools=[LOOK])


async def test_the_job_s_variables_are_the_default_of_chats(tmp_path: Path) -> None:
    place = tokenizer_with_ends(tmp_path)
    template = place / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ 'thinks' if enable_thinking else '' }}")
    engine = Scripted(tokenizer=place)
    await engine.start()
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with (
        serving_openai(engine, template_variables={"enable_thinking": True}) as url,
        openai_client(url) as client,
    ):
        await client.chat.completions.create(**chat)
        for wanted in (True, False):
            await client.chat.completions.create(
                **chat, extra_body={"chat_template_kwargs": {"enable_thinking": wanted}}
            )
    default, with_it, without = [len(request.token_ids) for request in engine.requests]
    assert default == with_it > without
    await engine.shutdown()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [HELLO] * 10_001}, "messages: 10,001 items"),
        ({"messages": [HELLO], "tools": [{}] * 1001}, "tools: 1,001 items"),
        ({"messages": [{"role": "user", "content": "x" * ((4 << 20) + 1)}]}, "4,194,305 characters"),
        ({"messages": [{**HELLO, "role": "assistant", "tool_calls": 7}]}, "tool_calls"),
        ({"messages": [HELLO], "guided_json": "y" * 10_000}, "guided_json"),
        (b'{"messages": ' + b"[" * 50_000, "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', ""),
        (b"\xff", "not JSON"),
    ],
    ids=["messages", "tools", "characters", "calls", "guided", "nested", "surrogate", "bytes"],
)
async def test_what_is_too_much_is_refused_before_anything_is_done_with_it(
    engine: Scripted, body: Any, words: str
) -> None:
    async with serving_openai(engine) as url:
        message = await refusal(url, body)
        assert words in message
        assert len(message) < 1500
    assert engine.requests == []


async def test_bodies_have_a_largest_size(engine: Scripted) -> None:
    async with serving_openai(engine) as url:
        body = {"messages": [{"role": "user", "content": "x" * (17 << 20)}]}
        assert "more than 16,777,216 bytes" in await refusal(url, body, status=413)
        too_many = {"prompt": ["x" * 1000] * 129}
        assert "must not exceed 128 sequences" in await refusal(url, too_many, "completions")


async def test_arguments_nested_as_deep_as_json_may_be_are_no_error_of_the_server(engine: Scripted) -> None:
    async with serving_openai(engine) as url, aiohttp.ClientSession() as session:
        for depth in (10, 100, 500, 900, 990, 2000, 20_000):
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * depth + "]" * depth}}
            body = {"messages": [HELLO, {"role": "assistant", "tool_calls": [call]}]}
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert answer.status in (200, 400), depth


async def test_a_caller_that_leaves_aborts_its_request(engine: Scripted) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(_: GenerationRequest) -> GenerationResult:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    engine.generate = wait  # type: ignore[method-assign,assignment]
    async with serving_openai(engine) as url, openai_client(url) as client:
        task = asyncio.create_task(client.completions.create(model="tiny", prompt="x"))
        await begun.wait()
        task.cancel()
        await asyncio.wait_for(ended.wait(), 60)
