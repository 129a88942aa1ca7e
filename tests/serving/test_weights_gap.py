"""Weights that are published again and again: every request in the meantime is answered, by one replica."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy
import psutil
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from kuberoll_workers.local.watchdog import processes_of
from tests.local.support import TINY
from tests.rollouts.fakes import until
from tests.serving.hosts import PATIENCE_SECONDS, TOKENS, StartingHost, starting, until_ready

PUSHES = 6
_PROXY_CHANGE = "Got updated backend configs"

ENGINES: dict[str, dict[str, Any]] = {
    "Simulated": {"simulated": {"firstTokenSeconds": 0.0, "meanTokens": 20}},
    "VLLM": {"simulated": None, "engine_args": {"dtype": "float32", "max_model_len": 512, "enforce_eager": True}},
}


class Serving(NamedTuple):
    """A host that serves at `url`."""

    host: StartingHost
    url: str
    engine: str


@pytest.fixture(
    params=[
        pytest.param("Simulated", marks=pytest.mark.ray),
        pytest.param("VLLM", marks=(pytest.mark.ray, pytest.mark.engine, pytest.mark.long)),
    ]
)
def serving(request: pytest.FixtureRequest) -> Iterator[Serving]:
    engine = {"engine": request.param, **ENGINES[request.param]}
    # The one replica must not be taken out of service: there is no other.
    with starting(model=str(TINY), tokenizer=str(TINY), replicas=1, tokens=TOKENS, torch=True, **engine) as started:
        yield Serving(started, until_ready(started)[-1]["url"], request.param)


class Client:
    """Asks in loops, and keeps every answer that is not as documented."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session
        self._numbers = itertools.count()
        self.answers: dict[str, int] = {}
        self.bad: list[str] = []
        self.versions: set[str] = set()

    async def weights(self) -> dict[str, Any]:
        return await self._json("GET", "/v1/weights", TOKENS.read)

    async def publish(self, uri: str, version: str) -> None:
        body = {"uri": uri, "version": version}
        assert await self._json("POST", "/v1/weights", TOKENS.weights, json=body) == {"version": version}

    async def until(self, version: str) -> None:
        """Wait until the version is served; each answer on the way names it as the wanted one."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                found = await self.weights()
                assert self.bad == []
                assert found["wanted"] == version
                if set(found["replicas"].values()) == {version}:
                    return

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        asked = [self._read("/v1/weights"), self._read("/info"), self._read("/replicas"), self._stream()]
        tasks = [asyncio.create_task(work) for work in (*asked, *(self._generate() for _ in range(4)))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends

    async def _read(self, path: str) -> None:
        while True:
            await self._json("GET", path, TOKENS.read)

    async def _generate(self) -> None:
        while True:
            sampling = {"max_tokens": 200, "temperature": 2.0, "seed": next(self._numbers)}
            body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
            result = await self._json("POST", "/v1/generate", TOKENS.generate, json=body)
            if result:
                spans = result["policy_versions"]
                assert [start for _, start, _ in spans] == [0, *(end for *_, end in spans[:-1])]
                assert spans[-1][2] == len(result["token_ids"])
                self.versions.update(version for version, *_ in spans)

    async def _stream(self) -> None:
        while True:
            body = {"prompt": [5, 6, 7], "max_tokens": 50, "stream": True}
            status, text, kind = await self._ask("POST", "/v1/completions", TOKENS.generate, json=body)
            if (status, kind) != (200, "text/event-stream") or not text.endswith("data: [DONE]\n\n"):
                self.bad.append(f"stream: {status} {text[:200]}")
            self._count("stream")

    async def _json(self, method: str, path: str, token: str, **options: Any) -> dict[str, Any]:
        status, text, kind = await self._ask(method, path, token, **options)
        self._count(path)
        if status not in (200, 202) or kind != "application/json":
            self.bad.append(f"{method} {path}: {status} {text[:200]}")
            return {}
        found: dict[str, Any] = json.loads(text)
        return found

    async def _ask(self, method: str, path: str, token: str, **options: Any) -> tuple[int, str, str]:
        headers = {"authorization": f"Bearer {token}"}
        async with self._session.request(method, self._url + path, headers=headers, **options) as answer:
            return answer.status, await answer.text(), answer.content_type

    def _count(self, what: str) -> None:
        self.answers[what] = self.answers.get(what, 0) + 1


async def test_every_request_is_answered_while_weights_change(serving: Serving, tmp_path: Path) -> None:
    log = serving.host.scratch / "log"
    async with aiohttp.ClientSession() as session:
        client = Client(serving.url, session)
        async with client.asking():
            async with asyncio.timeout(PATIENCE_SECONDS):
                await until(lambda: len(client.answers) == 5)
                # Until the proxy has the replica, its requests pass through a fallback.
                await until(lambda: "servers=[ServerConfig(name='SERVE_REPLICA" in log.read_text())
            before = log.read_text().count(_PROXY_CHANGE)
            for number in range(PUSHES):
                await client.publish(str(TINY), f"step-{number}")
                await client.until(f"step-{number}")
            # Without waiting for the one before.
            for number in range(PUSHES):
                await client.publish(str(TINY), f"fast-{number}")
            await client.until(f"fast-{PUSHES - 1}")
            async with asyncio.timeout(PATIENCE_SECONDS):
                await until(lambda: f"fast-{PUSHES - 1}" in client.versions)
            if serving.engine == "VLLM":
                await _refuses_what_does_not_fit(client, tmp_path)
        # Not even for a moment was the proxy without the replica.
        assert log.read_text().count(_PROXY_CHANGE) == before
        await _a_new_replica_has_the_newest(serving.host, client)


async def _refuses_what_does_not_fit(client: Client, tmp_path: Path) -> None:
    """A failed push is reported, and the former version goes on being served."""
    strange = tmp_path / "strange"
    strange.mkdir()
    with safe_open(TINY / "model.safetensors", framework="np") as file:
        names = list(file.keys())
    save_file({name: numpy.zeros(1, numpy.float32) for name in names}, strange / "model.safetensors")
    for version, uri, words in (
        ("missing", tmp_path / "nowhere", "is not a directory"),
        ("strange", strange, "has the shape"),
    ):
        await client.publish(str(uri), version)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while words not in " ".join((found := await client.weights())["problems"].values()):
                assert found["wanted"] == version
        assert set(found["replicas"].values()) == {f"fast-{PUSHES - 1}"}
    await client.publish(str(TINY), "mended")
    await client.until("mended")
    assert (await client.weights())["problems"] == {}


async def _a_new_replica_has_the_newest(started: StartingHost, client: Client) -> None:
    newest = (await client.weights())["wanted"]
    (old,) = (await client.weights())["replicas"]
    (replica,) = [process for process in processes_of(started.run_id) if "ServeReplica" in " ".join(process.cmdline())]
    replica.kill()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(aiohttp.ClientError, psutil.Error):
                found = await client.weights()
                if found and old not in found["replicas"] and None not in found["replicas"].values():
                    break
    assert (found["wanted"], list(found["replicas"].values())) == (newest, [newest])
