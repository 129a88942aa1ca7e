"""Replicas, weights and the token of a deployment, through a real Ray Serve and its proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from kuberoll_api.contract import SCOPES, Scope
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.local.watchdog import processes_of
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import GenerationRequest, PolicyRefused, SamplingParameters
from tests.policy.openai_serving import TINY
from tests.serving.hosts import PATIENCE_SECONDS, TOKENS, StartingHost, starting, until_ready

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]


class Answer(NamedTuple):
    status: int
    body: dict[str, Any]
    headers: Any


class Deployment:
    """The host and those who ask it."""

    def __init__(self, host: StartingHost, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._host = host
        self._session = session

    async def ask(
        self, method: str, path: str, *, url: str | None = None, token: str | None = None, **options: Any
    ) -> Answer:
        if token is None:
            token = TOKENS.weights if path == "/v1/weights" else TOKENS.generate
        headers = {"authorization": f"Bearer {token}"} if token else {}
        async with self._session.request(method, (url or self.url) + path, headers=headers, **options) as answer:
            # Serve's own words are none: of a replica that was killed under the request.
            body = await answer.json() if answer.content_type == "application/json" else {}
            return Answer(answer.status, body, answer.headers)

    async def replicas(self) -> dict[str, str]:
        return {one["id"]: one["url"] for one in (await self.ask("GET", "/replicas")).body.get("replicas", [])}

    async def until_replicas(self, fit: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not fit(found := await self.replicas()):
                pass
        return found

    async def until_weights(self, fit: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not ((found := (await self.ask("GET", "/v1/weights")).body) and fit(found)):
                pass
        return found

    def replica_processes(self) -> dict[int, Any]:
        found = processes_of(self._host.run_id)
        return {process.pid: process for process in found if "ServeReplica" in " ".join(process.cmdline())}


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[StartingHost, str]]:
    simulated = {"firstTokenSeconds": 0.0, "meanTokens": 20}
    more: dict[str, Any] = {"tokenizer": str(TINY), "simulated": simulated, "max_ongoing_requests": 77}
    # vLLM's API needs PyTorch, without an engine, too.
    with starting(replicas=2, tokens=TOKENS, torch=True, **more) as started:
        yield started, until_ready(started)[-1]["url"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(host: tuple[StartingHost, str]) -> AsyncIterator[Deployment]:
    async with aiohttp.ClientSession() as session:
        yield Deployment(*host, session)


def request(session: str = "s") -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        session_id=session,
        token_ids=token_array([1, 2]),
        sampling=SamplingParameters(max_tokens=5, seed=1),
    )


async def test_who_does_not_show_the_token_gets_nothing(deployment: Deployment) -> None:
    for token in ("", "another", TOKENS.generate + "x", TOKENS.weights[:-1]):
        for method, path in [("GET", "/info"), ("GET", "/replicas"), ("POST", "/v1/weights"), ("POST", "/v1/generate")]:
            answer = await deployment.ask(method, path, token=token)
            assert (answer.status, answer.body["error"]["type"]) == (401, "Unauthorized")
    assert (await deployment.ask("GET", "/healthz", token="")).status == 200
    async with ServeClient(deployment.url, limit=1, token="another") as client:
        with pytest.raises(PolicyRefused, match="answered 401"):
            await client.generate(request())
    async with ServeClient(deployment.url, limit=1, token=TOKENS.generate) as client:
        assert len((await client.generate(request())).token_ids) > 0
        assert (await client.info()).max_ongoing_requests == 77


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_token_does_what_its_scope_is_for(deployment: Deployment, scope: Scope) -> None:
    token = TOKENS.for_scope(scope)
    for method, path, opened_by in [
        ("GET", "/info", SCOPES),
        ("GET", "/replicas", SCOPES),
        ("GET", "/v1/weights", SCOPES),
        ("GET", "/v1/models", SCOPES),
        ("POST", "/v1/weights", ("weights",)),
        ("POST", "/v1/generate", ("generate",)),
        ("POST", "/v1/chat/completions", ("generate",)),
        ("POST", "/v1/completions", ("generate",)),
    ]:
        answer = await deployment.ask(method, path, token=token, json=None if method == "GET" else {})
        if scope in opened_by:
            # Of an empty body all that is left to say is what is missing in it.
            assert answer.status == (200 if method == "GET" else 400), (method, path)
        else:
            assert (answer.status, answer.body["error"]["type"]) == (403, "Forbidden"), (method, path)
            assert f"token of scope {opened_by[0]}" in answer.body["error"]["message"]


async def test_replicas_answer_at_addresses_of_their_own(deployment: Deployment) -> None:
    replicas = await deployment.until_replicas(lambda found: len(found) == 2)
    for name, url in replicas.items():
        async with ServeClient(url, limit=1, token=TOKENS.generate) as client:
            assert (await client.generate(request())).policy_versions[0][0] == "0"
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5, "seed": 3}}
        answer = await deployment.ask("POST", "/v1/generate", url=url, json=body)
        assert answer.headers["x-kuberoll-replica"] == name
        assert answer.headers["x-kuberoll-load"] == "0"
        refused = await deployment.ask("POST", "/v1/generate", url=url, json={})
        assert (refused.status, refused.headers["x-kuberoll-replica"]) == (400, name)


async def test_weights_reach_all_replicas_and_those_to_come(deployment: Deployment) -> None:
    before = await deployment.until_replicas(lambda found: len(found) == 2)
    pids = set(deployment.replica_processes())
    assert (await deployment.ask("GET", "/v1/weights")).body == {
        "wanted": "0",
        "replicas": dict.fromkeys(before, "0"),
        "problems": {},
    }
    answer = await deployment.ask("POST", "/v1/weights", json={"uri": "s3://bucket/step-7", "version": "step-7"})
    assert (answer.status, answer.body) == (202, {"version": "step-7"})
    weights = await deployment.until_weights(lambda found: set(found["replicas"].values()) == {"step-7"})
    assert (weights["wanted"], weights["replicas"].keys()) == ("step-7", before.keys())
    # None of them was started anew for it.
    assert set(deployment.replica_processes()) == pids

    victim = next(iter(deployment.replica_processes().values()))
    victim.kill()
    after = await deployment.until_replicas(lambda found: len(found) == 2 and found.keys() != before.keys())
    assert len(after.keys() & before.keys()) == 1
    for url in after.values():
        assert (await deployment.ask("GET", "/info", url=url)).body["policy_version"] == "step-7"
        async with ServeClient(url, limit=1, token=TOKENS.generate) as client:
            assert [span[0] for span in (await client.generate(request())).policy_versions] == ["step-7"]


async def test_weights_that_are_no_others_are_refused(deployment: Deployment) -> None:
    await deployment.ask("POST", "/v1/weights", json={"uri": "/mnt/a", "version": "a"})
    assert (await deployment.ask("POST", "/v1/weights", json={"uri": "/mnt/a", "version": "a"})).status == 202
    for body, status, words in [
        ({"uri": "/mnt/b", "version": "a"}, 409, "version a is already /mnt/a"),
        ({"uri": "/mnt/b", "version": "0"}, 400, "the model's own"),
        ({"uri": "/mnt/b"}, 400, "version"),
        ({"uri": "/mnt/b", "version": "not one"}, 400, "version"),
    ]:
        answer = await deployment.ask("POST", "/v1/weights", json=body)
        assert answer.status == status
        assert words in answer.body["error"]["message"]


async def test_the_model_s_own_weights_come_back(deployment: Deployment) -> None:
    await deployment.ask("POST", "/v1/weights", json={"uri": "/mnt/c", "version": "c"})
    await deployment.until_weights(lambda found: set(found["replicas"].values()) == {"c"})
    answer = await deployment.ask("POST", "/v1/weights", json={"uri": None, "version": "0"})
    assert (answer.status, answer.body) == (202, {"version": "0"})
    found = await deployment.until_weights(lambda found: set(found["replicas"].values()) == {"0"})
    assert found["wanted"] == "0"
    refused = await deployment.ask("POST", "/v1/weights", json={"uri": None, "version": "1"})
    assert (refused.status, "uri" in refused.body["error"]["message"]) == (400, True)
