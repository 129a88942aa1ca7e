"""The Serve app behind a real Ray Serve and its proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import psutil
import pytest

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.local.watchdog import processes_of
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import GenerationRequest, PolicyRefused, SamplingParameters
from tests.serving.conftest import ServingHost


def request(*ids: int, session: str = "s", **sampling: object) -> GenerationRequest:
    values: dict[str, Any] = {"max_tokens": 30, "seed": 1, **sampling}
    return GenerationRequest(
        request_id="r", session_id=session, token_ids=token_array(ids), sampling=SamplingParameters(**values)
    )


@pytest.fixture
async def client(simulated_host: ServingHost) -> AsyncIterator[ServeClient]:
    async with ServeClient(simulated_host.url, limit=64) as made:
        yield made


async def test_many_at_once(client: ServeClient) -> None:
    results = await asyncio.gather(*(client.generate(request(1, 2, n, session=f"s{n}")) for n in range(200)))
    assert all(len(result.token_ids) == len(result.logprobs) for result in results)
    again = await client.generate(request(1, 2, 7, session="elsewhere"))
    assert again == results[7]


async def test_info(client: ServeClient) -> None:
    info = await client.wait_ready(10)
    assert (info.engine, info.max_model_len) == ("simulated", 1000)


async def test_invalid_requests_are_refused(client: ServeClient) -> None:
    with pytest.raises(PolicyRefused, match="1001 tokens"):
        await client.generate(request(*range(1001)))
    with pytest.raises(PolicyRefused, match="token_ids is empty"):
        await client.generate(request())


async def test_plain_json_works_too(simulated_host: ServingHost, client: ServeClient) -> None:
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5, "seed": 3}}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{simulated_host.url}/v1/generate", json=body) as response:
            assert response.status == 200
            result = wire.decode_result(await response.read(), wire.JSON)
        async with session.get(f"{simulated_host.url}/nowhere") as response:
            assert response.status == 404
            assert (await response.json())["error"]["message"] == "GET /nowhere: there is no such route"
        async with session.post(
            f"{simulated_host.url}/v1/generate", data=b"x", headers={"content-type": "text/html"}
        ) as response:
            assert response.status == 415
    assert result == await client.generate(request(1, 2, 3, max_tokens=5, seed=3))


async def test_openai_s_routes_are_there_too(simulated_host: ServingHost) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{simulated_host.url}/v1/models") as response:
            assert response.status == 200
            assert response.headers["x-kuberoll-replica"]
        async with session.get(f"{simulated_host.url}/v1/nowhere") as response:
            assert response.status == 404


@pytest.mark.parametrize("direct", [True, False])
async def test_bodies_that_do_not_arrive_keep_nobody_out(simulated_host: ServingHost, direct: bool) -> None:
    async with ServeClient(simulated_host.url, limit=64) as endpoint:
        urls = [url for _, url in await endpoint.replicas()] if direct else [simulated_host.url]
        head = b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{"
        # More than a replica works on at once.
        held = [await asyncio.open_connection("127.0.0.1", int(urls[0].rpartition(":")[2])) for _ in range(1_200)]
        try:
            for _, writer in held:
                writer.write(head)
            async with ServeClient(urls[0], limit=64) as client:
                await asyncio.gather(*(client.generate(request(1, 2, n, session=f"s{n}")) for n in range(100)))
                await client.check_health()
            reader, _ = held[-1]
            # It still waits: the others were not answered after it.
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.01)
        finally:
            for _, writer in held:
                writer.transport.abort()


async def test_a_websocket_is_refused(simulated_host: ServingHost) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"{simulated_host.url}/v1/realtime")
    assert refused.value.status == 403


async def test_nobody_listens_where_other_machines_reach_it(simulated_host: ServingHost) -> None:
    listening = {
        (process.name(), connection.laddr.ip)
        for process in processes_of(simulated_host.host.run_id)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {name for name, _ in listening} >= {"gcs_server", "haproxy", "raylet"}
    assert {address.removeprefix("::ffff:") for _, address in listening} == {"127.0.0.1"}


async def test_all_processes_can_be_found_by_the_watchdog(simulated_host: ServingHost) -> None:
    names = {process.name() for process in processes_of(simulated_host.host.run_id)}
    assert {"raylet", "gcs_server", "haproxy"} <= names
