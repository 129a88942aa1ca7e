"""Policies that somebody else serves: found out, asked for tokens, and marked where they tell none."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.client import Overloaded, Unreachable
from kuberoll_workers.policy.external import ExternalClient, open_external
from kuberoll_workers.policy.headers import SESSION_HEADER
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
    SamplingParameters,
    StructuredOutputs,
)
from kuberoll_workers.serving.engines.simulated import Simulated
from kuberoll_workers.serving.ray_settings import free_ports
from tests.policy.openai_serving import TINY, serving_openai
from tests.policy.test_client import serving

WINDOW = 512
KEY = "a key"


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(str(TINY))


def request(*ids: int, **sampling: Any) -> GenerationRequest:
    values: dict[str, Any] = {"max_tokens": 8, **sampling}
    return GenerationRequest(
        request_id="r", session_id="s", token_ids=token_array(ids or (5, 6)), sampling=SamplingParameters(**values)
    )


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[ExternalClient]:
    values: dict[str, Any] = {"api": "Auto", "model": None, "api_key": KEY, "limit": 4, **options}
    async with open_external([url], **values) as (client,):
        yield client


class Server:
    """A server of somebody else: JSON answers by path, 404 for all else; keeps what it was asked.

    An answer is a body, a status with a body, or a function of the request's body that gives one of them.
    """

    def __init__(self, **answers: Any) -> None:
        self.answers = {f"/{name.replace('__', '/')}": answer for name, answer in answers.items()}
        self.asked: list[tuple[str, Any]] = []
        self.headers: Mapping[str, str] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"null")
        self.asked.append((request.path, body))
        self.headers = request.headers
        answer = self.answers.get(request.path, (404, {"detail": "Not Found"}))
        if callable(answer):
            answer = answer(body)
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        return web.json_response(body, status=status)

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]


def listing(owner: str = "vllm", **more: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "m", "owned_by": owner, "max_model_len": WINDOW, **more}]}


def completion(text: str = "up", *, finish_reason: Any = "stop", **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason, **choice}]}


IDS: dict[str, Any] = {
    "token_ids": [355, 1],
    "logprobs": {"tokens": ["token_id:355", "token_id:1"], "token_logprobs": [-0.5, -0.25]},
}


@pytest.mark.slow
async def test_our_own_openai_surface_is_token_exact() -> None:
    engine = Simulated(
        model="none",
        tokenizer=str(TINY),
        settings=SimulatedEngine.model_validate({"responses": ["<action>up</action>", "down"]}),
        engine_args={"max_model_len": WINDOW},
    )
    await engine.start()
    async with serving_openai(engine) as url, opened(f"{url}/v1/", api="OpenAI") as client:
        # The first request imports vLLM.
        info = await client.wait_ready(240)
        assert (info.model, info.max_model_len) == ("tiny", WINDOW)
        for seed in range(6):
            for stop in ((), ("up", "ow")):
                asked = request(5, 6, 7, seed=seed, stop=stop, max_tokens=20)
                assert await client.generate(asked) == await engine.generate(asked)


async def test_what_vllm_is_asked_for() -> None:
    answer = completion(**IDS) | {"usage": {"prompt_tokens_details": {"cached_tokens": 2}}}
    server = Server(v1__models=listing(), v1__completions=answer, health={})
    async with serving(server.handle) as url, opened(url) as client:
        await client.wait_ready(10)
        result = await client.generate(request(5, 6, seed=3, stop=("x",), top_k=4, stop_token_ids=(9,)))
        assert (result.token_ids.tolist(), result.logprobs.tolist()) == ([355, 1], [-0.5, -0.25])
        assert (result.finish_reason, result.cached_tokens, result.exact) == ("stop", 2, True)
        assert server.headers["authorization"] == f"Bearer {KEY}"
        assert server.headers[SESSION_HEADER] == "s"
    (body,) = server.bodies("/v1/completions")
    assert body == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop": ["x"],
        "seed": 3,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "top_k": 4,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [9],
    }


MORE: dict[str, Any] = {
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 20,
}
FORMS: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": "[0-9]+",
    "choice": ["a", "b"],
    "grammar": 'root ::= "a"',
}


@pytest.mark.parametrize("form", FORMS)
async def test_all_that_vllm_can_honor_is_sent(form: str) -> None:
    server = Server(v1__models=listing(), v1__completions=completion(**IDS))
    async with serving(server.handle) as url, opened(url) as client:
        await client.generate(request(**MORE, structured_outputs=StructuredOutputs(**{form: FORMS[form]})))
    (body,) = server.bodies("/v1/completions")
    # A response of at most 8 tokens has no more at the least.
    expected = {**MORE, "min_tokens": 8, "structured_outputs": {form: FORMS[form]}}
    assert {name: body.get(name) for name in expected} == expected


@pytest.mark.parametrize("form", FORMS)
async def test_all_that_sglang_can_honor_is_sent(form: str) -> None:
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 355, None]]}
    server = Server(v1__models=listing("sglang"), model_info={"model_path": "m"}, generate={"meta_info": meta})
    asked = request(**MORE, structured_outputs=StructuredOutputs(**{form: FORMS[form]}))
    async with serving(server.handle) as url, opened(url) as client:
        if form == "choice":
            with pytest.raises(PolicyRefused, match=r"structuredOutputs\.choice: SGLang has no such setting"):
                await client.generate(asked)
            return
        await client.generate(asked)
    (body,) = server.bodies("/generate")
    names = {"json": "json_schema", "regex": "regex", "grammar": "ebnf"}
    value = '{"type":"object"}' if form == "json" else FORMS[form]
    expected = {**MORE, names[form]: value, "min_new_tokens": 8}
    del expected["min_tokens"]
    assert {name: body["sampling_params"].get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"min_p": 0.1}, "minP"),
        ({"repetition_penalty": 1.5}, "repetitionPenalty"),
        ({"min_tokens": 2}, "minTokens"),
        ({"stop_token_ids": (1,)}, "stopTokenIds"),
        ({"top_k": 3}, "topK"),
        ({"structured_outputs": StructuredOutputs(regex="a")}, "structuredOutputs"),
    ],
)
async def test_what_a_plain_server_cannot_be_told_is_refused(
    setting: dict[str, Any], name: str, tokenizer: HuggingFaceTokenizer
) -> None:
    def hosted(body: Any) -> Any:
        return (400, {"error": {"message": "no such field"}}) if "return_token_ids" in body else completion()

    server = Server(v1__models=listing("somebody"), v1__completions=hosted)
    async with serving(server.handle) as url, opened(url, tokenizer=tokenizer) as client:
        with pytest.raises(PolicyRefused, match=rf"sampling\.{name}: the server"):
            await client.generate(request(**setting))
        # The penalties of OpenAI's own API are no extension.
        await client.generate(request(presence_penalty=1.0))
    assert server.bodies("/v1/completions")[-1]["presence_penalty"] == 1.0


async def test_a_value_that_vllm_refuses_is_explained_in_its_words() -> None:
    server = Server(v1__models=listing(), v1__completions=(400, {"error": {"message": "invalid grammar"}}))
    async with serving(server.handle) as url, opened(url) as client:
        with pytest.raises(PolicyRefused, match=r"structuredOutputs: .* answered 400: invalid grammar"):
            await client.generate(request(structured_outputs=StructuredOutputs(grammar="(")))


async def test_ids_that_are_told_as_tokens() -> None:
    server = Server(v1__models=listing(), v1__completions=completion(logprobs=IDS["logprobs"]))
    async with serving(server.handle) as url, opened(url) as client:
        result = await client.generate(request())
    assert (result.token_ids.tolist(), result.exact) == ([355, 1], True)


async def test_sglang_is_asked_by_its_own_route() -> None:
    meta = {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 355, None], [-0.25, 1, None]],
        "cached_tokens": 2,
    }
    for path in ("model_info", "get_model_info"):
        server = Server(
            v1__models=listing("sglang"),
            generate={"text": "up", "meta_info": meta},
            **{path: {"model_path": "m", "is_generation": True}},
        )
        async with serving(server.handle) as url, opened(url) as client:
            assert (await client.wait_ready(10)).engine == "sglang"
            result = await client.generate(request(5, 6, seed=3, stop=("x",)))
        assert (result.token_ids.tolist(), result.logprobs.tolist()) == ([355, 1], [-0.5, -0.25])
        assert (result.finish_reason, result.cached_tokens, result.exact) == ("length", 2, True)
        (body,) = server.bodies("/generate")
        assert body["input_ids"] == [5, 6]
        assert body["return_logprob"] is True
        parameters = body["sampling_params"]
        assert (parameters["max_new_tokens"], parameters["sampling_seed"], parameters["stop"]) == (8, 3, ["x"])
        assert parameters["no_stop_trim"] is True


@pytest.mark.parametrize(
    ("finish", "error"),
    [
        ({"type": "abort", "message": "too long", "status_code": 400}, PolicyRefused),
        ({"type": "abort", "message": "out of memory", "status_code": 503}, PolicyUnavailable),
        ({"type": "abort"}, PolicyUnavailable),
        (None, PolicyUnavailable),
    ],
)
async def test_what_sglang_did_not_finish(finish: Any, error: type[Exception]) -> None:
    server = Server(
        v1__models=listing("sglang"),
        model_info={"model_path": "m"},
        generate={"meta_info": {"finish_reason": finish, "output_token_logprobs": []}},
    )
    async with serving(server.handle) as url, opened(url) as client:
        with pytest.raises(error):
            await client.generate(request())


async def test_texts_without_ids_are_encoded_and_marked(tokenizer: HuggingFaceTokenizer) -> None:
    def hosted(body: Any) -> Any:
        if "return_token_ids" in body:
            return 400, {"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}
        return completion("<action>up", finish_reason="stop", logprobs={"tokens": ["?"], "token_logprobs": [-1.0]})

    server = Server(v1__models=listing("somebody", max_model_len=None), v1__completions=hosted)
    async with serving(server.handle) as url, opened(url, tokenizer=tokenizer, window=100) as client:
        assert (await client.wait_ready(10)).max_model_len == 100
        for _ in range(2):
            result = await client.generate(request(stop=("x",)))
            assert result.token_ids == tokenizer.encode("<action>up")
            assert (len(result.logprobs), result.finish_reason, result.exact) == (0, "stop", False)
        # What it cannot be told is not left out in silence.
        with pytest.raises(PolicyRefused, match=r"sampling\.topK"):
            await client.generate(request(top_k=3))
    # What it does not know it is not asked again.
    assert ["return_token_ids" in body for body in server.bodies("/v1/completions")] == [True, False, False]
    async with serving(server.handle) as url, opened(url, window=100) as client:
        with pytest.raises(PolicyRefused, match="returns no token ids"):
            await client.generate(request())


async def test_servers_without_log_probabilities(tokenizer: HuggingFaceTokenizer) -> None:
    def bare(body: Any) -> Any:
        return (422, {"detail": "logprobs are not supported"}) if "logprobs" in body else completion()

    server = Server(v1__models=listing(), v1__completions=bare)
    async with serving(server.handle) as url, opened(url, tokenizer=tokenizer) as client:
        assert (await client.generate(request())).token_ids == tokenizer.encode("up")


@pytest.mark.parametrize("said", [{"stop_reason": "END"}, {"matched_stop": "END"}])
async def test_stop_strings_that_were_cut_off_are_put_back(
    tokenizer: HuggingFaceTokenizer, said: dict[str, str]
) -> None:
    server = Server(v1__models=listing(), v1__completions=completion("up ", **said))
    async with serving(server.handle) as url, opened(url, tokenizer=tokenizer) as client:
        assert (await client.generate(request(stop=("x", "END")))).token_ids == tokenizer.encode("up END")
        assert (await client.generate(request())).token_ids == tokenizer.encode("up ")


async def test_kuberoll_endpoints_are_recognized() -> None:
    given = GenerationResult(token_ids=token_array([3]), logprobs=array("f", [-0.5]), finish_reason="stop")

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/generate":
            return web.Response(body=wire.encode_result(given), content_type=wire.MSGPACK)
        assert request.headers["authorization"] == f"Bearer {KEY}"
        info = {"model": "m", "engine": "e", "max_model_len": 7, "vocab_size": 9, "policy_version": "0"}
        return web.json_response(info if request.path == "/info" else {})

    for api in ("Auto", "KubeRoll"):
        async with serving(handler) as url, opened(url, api=api) as client:
            assert (await client.wait_ready(10)).max_model_len == 7
            assert await client.generate(request()) == given


async def test_what_cannot_be_known_is_asked_for() -> None:
    server = Server(v1__models={"data": [{"id": "m"}]})
    async with serving(server.handle) as url, opened(url) as client:
        with pytest.raises(PolicyRefused, match=r"set spec\.rollout\.maxSequenceLength"):
            await client.wait_ready(10)
    server = Server(v1__models=(401, {"error": {"message": "no key"}}))
    async with serving(server.handle) as url, opened(url) as client:
        with pytest.raises(PolicyRefused, match=r"(?s)no key.*apiKeyVariable"):
            await client.wait_ready(10)


async def test_a_server_that_lists_nothing_is_told_its_model() -> None:
    server = Server(v1__completions=completion(**IDS))
    async with serving(server.handle) as url, opened(url, api="OpenAI", model="mine", window=64) as client:
        await client.generate(request())
        assert server.bodies("/v1/completions")[0]["model"] == "mine"


async def test_the_model_among_several() -> None:
    cards = [{"id": "other", "owned_by": "vllm", "max_model_len": 1}, *listing()["data"]]
    server = Server(v1__models={"data": cards}, v1__completions=completion(**IDS))
    async with serving(server.handle) as url, opened(url, model="m") as client:
        assert (await client.info()).max_model_len == WINDOW
        await client.generate(request())
        assert server.bodies("/v1/completions")[0]["model"] == "m"


async def test_waiting_for_a_server_that_starts() -> None:
    begun: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        begun.append(request.path)
        if len(begun) < 4:
            return web.Response(status=503, text="loading")
        return await Server(v1__models=listing(), health={}).handle(request)

    async with serving(handler) as url, opened(url) as client:
        assert (await client.wait_ready(30, interval=0.01)).model == "m"
    async with serving(Server().handle) as url, opened(url) as client:
        with pytest.raises(PolicyUnavailable, match=r"not ready within 0\.2 s: .*asked for /v1/models"):
            await client.wait_ready(0.2, interval=0.01)


async def test_health() -> None:
    sick = Server(v1__models=listing(), health=(503, {}))
    async with serving(sick.handle) as url, opened(url) as client:
        with pytest.raises(PolicyUnavailable, match=f"not healthy: {url} answered 503"):
            await client.check_health()
        sick.answers["/health"] = (404, {})
        await client.check_health()
    async with opened("http://127.0.0.1:9") as client:
        with pytest.raises(PolicyUnavailable, match=r"^http://127\.0\.0\.1:9: connection refused$"):
            await client.check_health()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, PolicyRefused),
        (401, PolicyRefused),
        (404, PolicyRefused),
        (408, PolicyUnavailable),
        (429, Overloaded),
        (500, PolicyUnavailable),
        (502, PolicyUnavailable),
        (503, Overloaded),
    ],
)
@pytest.mark.parametrize("body", [{"error": {"message": "words"}}, {"detail": "words"}, {"message": "words"}, "words"])
async def test_errors(status: int, error: type[Exception], body: Any) -> None:
    server = Server(v1__models=listing(), v1__completions=(status, body))
    async with serving(server.handle) as url, opened(url) as client:
        with pytest.raises(error, match=f"answered {status}: words") as caught:
            await client.generate(request())
    assert type(caught.value) is error
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"choices": []}, PolicyUnavailable),
        ("<html>", PolicyUnavailable),
        (completion(finish_reason=None, **IDS), PolicyUnavailable),
        (completion(finish_reason="error", **IDS), PolicyUnavailable),
        (completion(finish_reason="content_filter", **IDS), PolicyRefused),
        (completion(token_ids=[355, 1]), PolicyRefused),
    ],
)
async def test_answers_that_are_none(answer: Any, error: type[Exception]) -> None:
    server = Server(v1__models=listing(), v1__completions=answer)
    async with serving(server.handle) as url, opened(url) as client:
        with pytest.raises(error, match=url):
            await client.generate(request())


async def test_a_retry_is_told_when_to_come() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response(listing())
        return web.json_response({}, status=429, headers={"retry-after": "7"})

    async with serving(handler) as url, opened(url) as client:
        with pytest.raises(Overloaded) as caught:
            await client.generate(request())
    assert caught.value.retry_after == 7


async def test_the_window() -> None:
    server = Server(v1__models=listing(), v1__completions=completion(**IDS))
    async with serving(server.handle) as url, opened(url) as client:
        await client.generate(request(*[5] * (WINDOW - 3)))
        result = await client.generate(request(*[5] * WINDOW))
        assert (len(result.token_ids), result.finish_reason) == (0, "length")
        with pytest.raises(PolicyRefused, match=f"{WINDOW + 1} tokens, the server's window {WINDOW}"):
            await client.generate(request(*[5] * (WINDOW + 1)))
    assert [body["max_tokens"] for body in server.bodies("/v1/completions")] == [3]


async def test_nobody_listening() -> None:
    (port,) = free_ports(1)
    async with opened(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(Unreachable):
            await client.generate(request())


async def test_cancelling_closes_the_request() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path != "/v1/completions":
            return await Server(v1__models=listing()).handle(request)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return web.Response()

    async with serving(handler) as url, opened(url) as client:
        task = asyncio.create_task(client.generate(request()))
        await begun.wait()
        task.cancel()
        await ended.wait()


async def test_many_first_requests_ask_once_what_it_is() -> None:
    server = Server(v1__models=listing(), v1__completions=completion(**IDS))
    async with serving(server.handle) as url, opened(url) as client:
        await asyncio.gather(*(client.generate(request()) for _ in range(20)))
    assert len(server.bodies("/v1/models")) == 1


@pytest.mark.parametrize(
    ("ids", "logprobs", "words"),
    [
        ([355, 1 << 40], [-0.5, -0.25], "an invalid token id"),
        ([355, 1], [-0.5], "2 token ids but 1 log-probabilities"),
        ([355, 1], [-0.5, None], "2 token ids but 1 log-probabilities"),
    ],
)
async def test_answers_that_cannot_be_are_the_server_s_fault_and_tried_again(
    ids: list[int], logprobs: list[float | None], words: str
) -> None:
    answer = completion(token_ids=ids, logprobs={"tokens": ["a", "b"], "token_logprobs": logprobs})
    server = Server(v1__models=listing(), v1__completions=answer)
    async with serving(server.handle) as url, opened(url) as client:
        with pytest.raises(PolicyUnavailable, match=words):
            await client.generate(request())
