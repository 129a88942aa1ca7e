"""Engines over HTTP that are out of order: KubeRoll's own interface, and that of OpenAI's completions."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import web

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.external.client import ExternalClient
from kuberoll_workers.policy.headers import SESSION_HEADER
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult
from tests.faults.blame.service import CUT, GARBAGE, HALF, RESET, SILENT

WINDOW = 600
_GOOD = GenerationResult(token_ids=token_array(map(ord, "x")), logprobs=array("f", [-0.5]), finish_reason="stop")
_ODD: Mapping[str, Callable[[GenerationRequest], GenerationResult]] = {
    "abort": lambda _: dataclasses.replace(_GOOD, finish_reason="abort"),
    "nan": lambda _: dataclasses.replace(_GOOD, logprobs=array("f", [float("nan")])),
    "mismatch": lambda _: dataclasses.replace(_GOOD, logprobs=array("f", [-0.5, -0.5])),
    "too many": lambda asked: dataclasses.replace(
        _GOOD, token_ids=token_array([65] * 999), logprobs=array("f", [-0.5] * 999)
    ),
    "unknown tokens": lambda _: dataclasses.replace(_GOOD, token_ids=token_array([0x110000])),
}


class Engines:
    """Clients of one server, of which each request says by its client's URL what becomes of it."""

    def __init__(self, choose: Callable[[int], str], nobody: str) -> None:
        """
        Args:
            choose: What the engine does for a trajectory, by its task index: `own/WHAT` or `openai/WHAT`, with `once/`
                before `WHAT` at the first request only.
            nobody: A URL where nobody listens.
        """
        self._choose, self._nobody = choose, nobody
        self._asked: collections.Counter[str] = collections.Counter()
        self.url = ""
        self._clients: dict[str, Any] = {}
        self._stack = AsyncExitStack()
        self._over = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """As `Policy.generate`."""
        chosen = self._choose(int(request.session_id.split("-")[0]))
        if chosen not in self._clients:
            api, _, what = chosen.partition("/")
            url = self._nobody if what == "nobody" else f"{self.url}/{what.replace('/', '-').replace(' ', '_')}"
            client: Any = ServeClient(url, limit=64)
            if api == "openai":
                # Nobody tells which model there is, where nobody is.
                client = ExternalClient(url, api="OpenAI", model="m", api_key=None, limit=64, window=WINDOW)
            self._clients[chosen] = await self._stack.enter_async_context(client)
        result: GenerationResult = await self._clients[chosen].generate(request)
        return result

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Engines]:
        """Answer until the context ends."""
        app = web.Application()
        app.router.add_get("/{what}/v1/models", self._models)
        app.router.add_post("/{what}/v1/generate", self._generate)
        app.router.add_post("/{what}/v1/completions", self._complete)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        try:
            yield self
        finally:
            self._over.set()
            await self._stack.aclose()
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": WINDOW, "owned_by": "vllm"}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = wire.decode_request(await request.read())
        what = self._what(request, asked.session_id)
        if what in _ODD:
            return _own(_ODD[what](asked))
        return await self._out_of_order(request, what) or _own(_GOOD)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        what = self._what(request, request.headers[SESSION_HEADER])
        if what == "abort":
            return _completion(finish_reason="abort")
        if what == "mismatch":
            return _completion(logprobs={"token_logprobs": [-0.5, -0.5]})
        return await self._out_of_order(request, what) or _completion()

    def _what(self, request: web.Request, session: str) -> str:
        what = request.match_info["what"].replace("_", " ")
        if what.startswith("once-"):
            self._asked[session] += 1
            return what.removeprefix("once-") if self._asked[session] == 1 else "200"
        return what

    async def _out_of_order(self, request: web.Request, what: str) -> web.StreamResponse | None:
        if what == "200":
            return None
        if what.isdecimal():
            return web.json_response({"error": {"type": "x", "message": "the engine's words"}}, status=int(what))
        if what == SILENT:
            await self._over.wait()
        if what in ("html", "empty body"):
            return web.Response(text="<html>welcome</html>" if what == "html" else "", content_type="text/html")
        assert request.transport is not None
        if what == HALF:
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b"{")
        elif what == GARBAGE:
            request.transport.write(b"\x00 no HTTP\r\n\r\n")
        if what in (CUT, GARBAGE, HALF):
            request.transport.close()
        elif what == RESET:
            request.transport.abort()
        else:
            assert what == SILENT, what
        return web.Response()


def _own(result: GenerationResult) -> web.Response:
    return web.Response(body=wire.encode_result(result), content_type=wire.MSGPACK)


def _completion(**changes: Any) -> web.Response:
    choice = {
        "text": "x", "finish_reason": "stop", "token_ids": [120], "logprobs": {"token_logprobs": [-0.5]}, **changes,
    }  # fmt: skip
    return web.Response(body=json.dumps({"choices": [choice]}), content_type="application/json")
