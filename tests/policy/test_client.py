"""The client against a server that misbehaves in every way."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.agent_sessions import AgentSession
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.headers import SESSION_HEADER
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    GenerationResult,
    PolicyRefused,
    PolicyUnavailable,
    SamplingParameters,
)
from kuberoll_workers.policy.routing.discovery import StaticDiscovery
from kuberoll_workers.policy.routing.router import RoutedPolicy
from kuberoll_workers.serving.ray_settings import free_ports

REQUEST = GenerationRequest(
    request_id="r", session_id="trajectory-1", token_ids=token_array([1, 2]), sampling=SamplingParameters(max_tokens=4)
)
RESULT = GenerationResult(token_ids=token_array([3]), logprobs=array("f", [-0.5]), finish_reason="stop")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def answered(handler: Handler) -> GenerationResult:
    async with serving(handler) as url, ServeClient(url, limit=2) as client:
        return await client.generate(REQUEST)


async def test_a_result() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.headers[SESSION_HEADER] == "trajectory-1"
        assert wire.decode_request(await request.read()) == REQUEST
        return web.Response(body=wire.encode_result(RESULT), content_type=wire.MSGPACK)

    assert await answered(handler) == RESULT


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_client_errors_are_refusals(status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"error": {"type": "X", "message": "token 9 is too large"}}, status=status)

    with pytest.raises(PolicyRefused, match="token 9 is too large"):
        await answered(handler)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_server_errors_are_worth_another_try(status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="no healthy upstream", status=status)

    with pytest.raises(PolicyUnavailable, match=f"answered {status}: no healthy upstream"):
        await answered(handler)


@pytest.mark.parametrize("body", [b"", b"garbage", wire.encode_result(RESULT)[:-3]])
async def test_torn_results_are_worth_another_try(body: bytes) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=wire.MSGPACK)

    with pytest.raises(PolicyUnavailable, match="not a generation result"):
        await answered(handler)


async def test_broken_connections_are_worth_another_try() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with pytest.raises(PolicyUnavailable):
        await answered(handler)


async def test_nobody_listening_is_worth_another_try() -> None:
    (port,) = free_ports(1)
    async with ServeClient(f"http://127.0.0.1:{port}", limit=1) as client:
        with pytest.raises(PolicyUnavailable):
            await client.generate(REQUEST)


async def test_no_more_connections_than_the_limit() -> None:
    here = most = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal here, most
        here += 1
        most = max(most, here)
        await asyncio.sleep(0.001)
        here -= 1
        return web.Response(body=wire.encode_result(RESULT), content_type=wire.MSGPACK)

    async with serving(handler) as url, ServeClient(url, limit=3) as client:
        await asyncio.gather(*(client.generate(REQUEST) for _ in range(20)))
    assert most == 3


async def test_cancelling_closes_the_request() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return web.Response()

    async with serving(handler) as url, ServeClient(url, limit=1) as client:
        task = asyncio.create_task(client.generate(REQUEST))
        await begun.wait()
        task.cancel()
        await ended.wait()


async def test_waiting_says_what_it_waited_for() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"error": {"type": "X", "message": "loading weights"}}, status=503)

    async with serving(handler) as url, ServeClient(url, limit=1) as client:
        with pytest.raises(PolicyUnavailable, match=r"not ready within 0\.05 s: .*loading weights"):
            await client.wait_ready(0.05, interval=0.01)


@pytest.mark.slow
async def test_another_service_is_recognized() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="<html>welcome</html>")

    async with serving(handler) as url, ServeClient(url, limit=1) as client:
        with pytest.raises(PolicyUnavailable, match="not a KubeRoll endpoint"):
            await client.wait_ready(5)


async def test_a_broken_connection_does_not_cost_a_session() -> None:
    tries = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal tries
        assert (request.method, request.path) == ("DELETE", "/sessions/s")
        assert request.headers["authorization"] == "Bearer t"
        tries += 1
        if tries == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"opened_at": 1.0, "calls": 2, "trajectories": []})

    async with serving(handler) as url, RoutedPolicy(StaticDiscovery([]), _no_replica) as policy:
        address = f"{url}/sessions/s"
        session = AgentSession(
            id="s", url=address, openai_base_url=f"{address}/v1", anthropic_base_url=address, token="t", model="m"
        )
        assert (await policy.close_session(session)).calls == 2
    assert tries == 2


def _no_replica(url: str) -> ServeClient:
    raise AssertionError(url)
