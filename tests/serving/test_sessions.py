"""Sessions over vLLM's API and a simulated engine: what well-behaved and hostile agents leave behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from openai import AsyncOpenAI

from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, PolicyUnavailable
from tests.policy.openai_serving import serving_openai, tokenizer_with_ends
from tests.serving.test_openai_api import ANSWER, END, LOOK, Scripted

pytestmark = pytest.mark.slow

HELLO: Any = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_with_ends(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tokenizer(place: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(str(place))


class Server:
    """A server with sessions."""

    def __init__(self, url: str, engine: Scripted, http: aiohttp.ClientSession) -> None:
        self.url, self.engine, self._http = url, engine, http

    async def open(self, **body: Any) -> dict[str, Any]:
        async with self._http.post(f"{self.url}/sessions", json=body) as answer:
            assert answer.status == 201, await answer.text()
            found: dict[str, Any] = await answer.json()
            return found

    async def close(self, session: dict[str, Any]) -> dict[str, Any]:
        async with self._http.delete(session["url"]) as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = await answer.json()
            return found

    async def state(self, session: dict[str, Any]) -> dict[str, Any]:
        async with self._http.get(session["url"]) as answer:
            found: dict[str, Any] = await answer.json()
            return found


@pytest.fixture
async def server(place: Path) -> AsyncIterator[Server]:
    engine = Scripted(tokenizer=place, window=2048)
    await engine.start()
    # The server closes idle connections, perhaps just when one is used again.
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        serving_openai(engine, tool_parser="hermes") as url,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        yield Server(url, engine, http)
    await engine.shutdown()


@asynccontextmanager
async def agent(session: dict[str, Any]) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=session["openai_base_url"], api_key=session["token"], max_retries=0, timeout=120
    ) as client:
        yield client


async def say(client: AsyncOpenAI, messages: list[Any], **more: Any) -> str:
    answer = await client.chat.completions.create(model="tiny", messages=messages, **more)
    return answer.choices[0].message.content or ""


def ids(trajectory: dict[str, Any]) -> list[int]:
    return [token for message in trajectory["messages"] for token in message["token_ids"]]


async def test_a_chat_is_one_contiguous_trajectory(server: Server, tokenizer: HuggingFaceTokenizer) -> None:
    letters = [*tokenizer.encode("u"), *tokenizer.encode("p"), END]
    server.engine.answers = [letters, [355, END], letters]
    session = await server.open()
    messages: list[Any] = [HELLO]
    async with agent(session) as client:
        for said in ("and now?", "and then?", ""):
            messages.append({"role": "assistant", "content": await say(client, messages)})
            messages.append({"role": "user", "content": said})
    closed = await server.close(session)
    (trajectory,) = closed["trajectories"]
    assert closed["continuity"] == trajectory["continuity"] == {"new": 1, "realigned": 2}
    assert [message["role"] for message in trajectory["messages"]] == ["context", "assistant"] * 3
    assert [item["token_ids"] for item in trajectory["messages"][1::2]] == [letters, [355, END], letters]
    assert all(item["learn"] and item["logprobs"] == [-0.5] * len(item["token_ids"])
               and item["policy_versions"] == [["7", 0, len(item["token_ids"])]]
               for item in trajectory["messages"][1::2])  # fmt: skip
    # The last request, and what was sampled after it, are the whole.
    assert ids(trajectory) == server.engine.requests[-1].token_ids.tolist() + letters
    assert tokenizer.decode_with_special_tokens(ids(trajectory)) == "".join(
        item["content"] for item in trajectory["messages"]
    )
    assert (trajectory["turn_count"], trajectory["finish_reason"]) == (3, "stop")
    # A request to close that was interrupted can be repeated.
    assert await server.close(session) == closed


async def test_all_apis_and_streams_are_captured(server: Server) -> None:
    session = await server.open()
    async with agent(session) as client:
        stream = await client.chat.completions.create(model="tiny", messages=[HELLO], stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER
        await client.responses.create(model="tiny", input="where?", store=False)
        await client.completions.create(model="tiny", prompt=[5, 6, 7], n=2, max_tokens=30)
        await client.chat.completions.create(model="tiny", messages=[HELLO, HELLO], logprobs=True, top_logprobs=2)
    async with anthropic.AsyncAnthropic(base_url=session["anthropic_base_url"], api_key="none") as claude:
        await claude.messages.create(model="tiny", max_tokens=30, messages=[{"role": "user", "content": "and?"}])
    closed = await server.close(session)
    assert (closed["calls"], closed["paths"]) == (6, 6)
    for trajectory in closed["trajectories"]:
        read, made = trajectory["messages"]
        assert (read["role"], made["role"], made["content"]) == ("context", "assistant", ANSWER)
        assert made["logprobs"] == [0.0] * len(made["token_ids"])


async def test_an_agent_that_rewrites_its_history_forks(server: Server) -> None:
    session = await server.open()
    async with agent(session) as client:
        answer = await say(client, [HELLO])
        chat = [HELLO, {"role": "assistant", "content": answer}, HELLO]
        await say(client, chat)
        # Other words in the model's mouth, a shorter history, and a second way to go on.
        await say(client, [HELLO, {"role": "assistant", "content": "down"}, HELLO])
        await say(client, [HELLO, HELLO])
        await say(client, [*chat[:2], {"role": "user", "content": "no"}])
    closed = await server.close(session)
    assert closed["continuity"] == {"new": 1, "clean": 2, "forked": 2}
    assert closed["paths"] == 4
    learned = [item["learn"] for path in closed["trajectories"] for item in path["messages"] if "learn" in item]
    # The first response is in two paths.
    assert sorted(learned) == [False, True, True, True, True, True]


async def test_parallel_calls_are_branches(server: Server) -> None:
    session = await server.open()
    async with agent(session) as client:
        first = await say(client, [HELLO])
        chat: list[Any] = [HELLO, {"role": "assistant", "content": first}]
        await asyncio.gather(*(say(client, [*chat, {"role": "user", "content": str(n)}]) for n in range(20)))
    closed = await server.close(session)
    assert (closed["calls"], closed["paths"]) == (21, 20)
    assert sum(item.get("learn", False) for path in closed["trajectories"] for item in path["messages"]) == 21


async def test_calls_after_the_end_are_gone(server: Server) -> None:
    session = await server.open()
    await server.close(session)
    async with agent(session) as client:
        with pytest.raises(openai.APIStatusError, match="is closed") as refused:
            await say(client, [HELLO])
        assert refused.value.status_code == 410


async def test_another_session_s_id_gives_nothing(server: Server) -> None:
    mine, other = await server.open(), await server.open()
    async with agent(other) as client:
        await say(client, [HELLO])
    guessed = {**mine, "openai_base_url": mine["openai_base_url"].replace(mine["id"], "replica-1-0")}
    async with agent(guessed) as client:
        with pytest.raises(openai.NotFoundError, match="this replica does not have it"):
            await say(client, [HELLO])
    async with agent(mine) as client:
        # The header of somebody else's session does not lead into it.
        await client.chat.completions.create(
            model="tiny", messages=[HELLO], extra_headers={"x-session-id": other["id"]}
        )
    assert (await server.close(mine))["continuity"] == {"new": 1}
    assert (await server.state(other))["calls"] == 1


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
async def test_many_sessions_at_once(server: Server, count: int) -> None:
    async def play(number: int) -> None:
        session = await server.open()
        # A client of its own for each would be most of the work.
        client = shared.with_options(base_url=session["openai_base_url"], api_key=session["token"])
        messages: list[Any] = [{"role": "user", "content": str(number)}]
        for _ in range(2):
            messages += [{"role": "assistant", "content": await say(client, messages)}, HELLO]
        (trajectory,) = (await server.close(session))["trajectories"]
        assert trajectory["turn_count"] == 2
        assert f"<|user|>{number}<|end|>" in trajectory["messages"][0]["content"]

    async with agent({"openai_base_url": server.url, "token": "none"}) as shared:
        await asyncio.gather(*(play(number) for number in range(count)))


async def test_a_call_that_fails_or_is_refused_leaves_nothing(server: Server) -> None:
    session = await server.open()
    async with agent(session) as client:
        with pytest.raises(openai.BadRequestError):
            await say(client, [HELLO], temperature=-1)
        server.engine.broken = "broken"
        with pytest.raises(openai.InternalServerError):
            await say(client, [HELLO])
    closed = await server.close(session)
    assert (closed["calls"], closed["trajectories"]) == (0, [])


async def test_an_answer_that_was_lost_is_asked_for_again(server: Server, tokenizer: HuggingFaceTokenizer) -> None:
    server.engine.answers = [[*tokenizer.encode(letter), END] for letter in "abc"]
    session = await server.open(max_calls=2)
    async with agent(session) as client:
        await say(client, [HELLO])
        # What the clients of OpenAI and Anthropic send once more says so.
        answer = await say(client, [HELLO], extra_headers={"x-stainless-retry-count": "1"})
        assert answer == "b"
        await say(client, [HELLO, {"role": "assistant", "content": answer}, HELLO])
        with pytest.raises(openai.BadRequestError, match="has had its 2 calls"):
            await say(client, [HELLO])
    closed = await server.close(session)
    assert (closed["calls"], closed["lost"]) == (2, 1)
    (trajectory,) = closed["trajectories"]
    assert [made["content"] for made in trajectory["messages"][1::2]] == ["b<|end|>", "c<|end|>"]


async def test_a_caller_who_leaves_uses_up_no_call(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await server.open(max_calls=1)
    begun, aborted = asyncio.Event(), asyncio.Event()

    async def never(request: GenerationRequest) -> GenerationResult:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            aborted.set()
        raise AssertionError(request)

    async with agent(session) as client:
        with monkeypatch.context() as patched:
            patched.setattr(server.engine, "generate", never)
            leaving = asyncio.create_task(say(client, [HELLO]))
            await begun.wait()
            leaving.cancel()
            await aborted.wait()
        assert await say(client, [HELLO]) == ANSWER
    assert (await server.close(session))["calls"] == 1


async def test_a_call_that_an_unusable_engine_did_not_begin_is_told(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = await server.open(), await server.open()

    def unusable() -> None:
        raise PolicyUnavailable("it samples tokens that are impossible")

    async with agent(session) as client, agent(other) as unlucky:
        with monkeypatch.context() as patched:
            patched.setattr(server.engine, "check_usable", unusable)
            for caller in (client, unlucky):
                with pytest.raises(openai.APIStatusError):
                    await say(caller, [HELLO])
        assert await say(client, [HELLO]) == ANSWER
    # What was repeated with more success is not missing.
    assert [(await server.close(one))["aborted"] for one in (session, other)] == [0, 1]


async def test_tools_in_a_session(server: Server, tokenizer: HuggingFaceTokenizer) -> None:
    call = '<tool_call>{"arguments": {"at":  1}, "name": "look"}</tool_call>'
    server.engine.answers = [[*tokenizer.encode(call), END]]
    session = await server.open()
    async with agent(session) as client:
        answer = await client.chat.completions.create(model="tiny", messages=[HELLO], tools=[LOOK])
        message = answer.choices[0].message
        (made,) = message.tool_calls or []
        chat: list[Any] = [
            HELLO,
            message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
            {"role": "tool", "tool_call_id": made.id, "content": "a wall"},
        ]
        await say(client, chat, tools=[LOOK])
    (trajectory,) = (await server.close(session))["trajectories"]
    assert trajectory["messages"][1]["content"] == f"{call}<|end|>"
    (read,) = trajectory["messages"][1]["tool_calls"]
    assert (read["function"]["name"], json.loads(read["function"]["arguments"])) == ("look", {"at": 1})
    # The one by which its answer names it.
    assert read["id"] == made.id == trajectory["messages"][2]["chat"][0]["tool_call_id"]
    assert trajectory["tools"] == [LOOK]
    assert "tool_calls" not in trajectory["messages"][3]
    assert trajectory["messages"][2]["content"] == "<|tool|>a wall<|end|><|assistant|>"


async def test_tools_of_all_apis_have_one_form(server: Server, tokenizer: HuggingFaceTokenizer) -> None:
    call = [*tokenizer.encode('<tool_call>{"name": "look", "arguments": {}}</tool_call>'), END]
    server.engine.answers = [call] * 4
    schema: Any = {"type": "object", "properties": {}}
    responses, messages = await server.open(), await server.open()
    async with agent(responses) as client:
        tool: Any = {"type": "function", "name": "look", "description": "See.", "parameters": schema}
        answer = await client.responses.create(model="tiny", input="hi", tools=[tool], store=False)
        (called,) = [item for item in answer.output if item.type == "function_call"]
        output = {"type": "function_call_output", "call_id": called.call_id, "output": "a wall"}
        items: Any = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in answer.output), output]
        await client.responses.create(model="tiny", input=items, tools=[tool], store=False)
    async with anthropic.AsyncAnthropic(base_url=messages["anthropic_base_url"], api_key="none") as claude:
        offered: Any = {"name": "look", "description": "See.", "input_schema": schema}
        chat: list[Any] = [{"role": "user", "content": "hi"}]
        said = await claude.messages.create(model="tiny", max_tokens=90, messages=chat, tools=[offered])
        (used,) = [block for block in said.content if block.type == "tool_use"]
        chat.append({"role": "assistant", "content": [block.model_dump() for block in said.content]})
        chat.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "a wall"}]})
        await claude.messages.create(model="tiny", max_tokens=90, messages=chat, tools=[offered])
    for session, identity in ((responses, called.call_id), (messages, used.id)):
        (trajectory,) = (await server.close(session))["trajectories"]
        function = {"name": "look", "description": "See.", "parameters": schema}
        assert trajectory["tools"] == [{"type": "function", "function": function}]
        assert trajectory["continuity"] == {"new": 1, "realigned": 1}
        first, last = trajectory["messages"][1::2]
        assert [made["id"] for made in first["tool_calls"]] == [identity]
        (answered,) = trajectory["messages"][2]["chat"]
        assert answered == {"role": "tool", "tool_call_id": identity, "content": "a wall"}
        # The agent never went on from these.
        assert ["id" in made for made in last["tool_calls"]] == [False]


NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("parser", "choice", "text"),
    [
        ("hermes", "required", '<tool_call>\n{"name": "look", "arguments": {"at":  1}}\n</tool_call>'),
        ("hermes", NAMED, '<tool_call>\n{"name": "look", "arguments": {"at":  1}}\n</tool_call>'),
        # vLLM has the models of this parser write plain JSON.
        ("granite", "required", '[{"name": "look", "parameters": {"at":  1}}]'),
        ("granite", NAMED, '{"at":  1}'),
    ],
)
async def test_calls_that_are_demanded(
    parser: str, choice: Any, text: str, place: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    engine = Scripted([*tokenizer.encode(text), END], tokenizer=place, window=2048)
    await engine.start()
    connector = aiohttp.TCPConnector(force_close=True)
    template = (place / "chat_template.jinja").read_text()
    if parser == "granite":
        # Its models' calls are a list.
        template = template.replace("'<tool_call>\n'", "'<tool_call>['").replace("'\n</tool_call>'", "']'")
    async with (
        serving_openai(engine, tool_parser=parser, chat_template=template) as url,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        server = Server(url, engine, http)
        session = await server.open()
        async with agent(session) as client:
            answer = await client.chat.completions.create(
                model="tiny", messages=[HELLO], tools=[LOOK], tool_choice=choice
            )
            message: Any = answer.choices[0].message
            (made,) = message.tool_calls
            await say(
                client, [HELLO, message, {"role": "tool", "tool_call_id": made.id, "content": "a wall"}], tools=[LOOK]
            )
        closed = await server.close(session)
    await engine.shutdown()
    assert closed["continuity"] == {"new": 1, "realigned": 1}
    (trajectory,) = closed["trajectories"]
    (read,) = trajectory["messages"][1]["tool_calls"]
    assert (read["id"], read["function"]["name"]) == (made.id, "look")
    assert json.loads(read["function"]["arguments"]) == {"at": 1}


@pytest.mark.parametrize("body", [{"idle_seconds": 0}, {"idle_seconds": 1e9}, {"idle": 1}, []])
async def test_a_wrong_request_to_open_is_refused(server: Server, body: Any) -> None:
    async with aiohttp.ClientSession() as http, http.post(f"{server.url}/sessions", json=body) as answer:
        assert answer.status == 400
        assert "the body: " in (await answer.json())["error"]["message"]
