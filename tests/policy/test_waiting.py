"""Waiting for an endpoint: what keeps it is told, soon and not too often."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.readiness import CHANGE_SECONDS, REPEAT_SECONDS, TroubleReports
from kuberoll_workers.policy.routing.discovery import StaticDiscovery
from kuberoll_workers.serving.ray_settings import free_ports
from tests.policy.test_client import serving
from tests.policy.test_routing_faults import answer, replicas, routed
from tests.rollouts.fakes import until


@given(st.lists(st.tuples(st.floats(0.01, 60), st.sampled_from("abc")), max_size=60))
def test_what_is_told_is_bounded_and_nothing_is_hidden_for_long(steps: list[tuple[float, str]]) -> None:
    now = 0.0
    told: list[tuple[float, str]] = []
    troubles = TroubleReports(lambda trouble: told.append((now, trouble)), clock=lambda: now)
    for seconds, trouble in steps:
        now += seconds
        troubles.add(trouble)
        at, last = told[-1]
        assert at == now or now - at < (REPEAT_SECONDS if last == trouble else CHANGE_SECONDS)
    assert [told[0][1]] == [steps[0][1]] if steps else not told
    for (before, first), (after, second) in itertools.pairwise(told):
        assert after - before >= (REPEAT_SECONDS if first == second else CHANGE_SECONDS)


async def trouble_of(url: str) -> str:
    """What is told first by somebody who waits for an endpoint, and goes on waiting."""
    told: asyncio.Queue[str] = asyncio.Queue()
    async with ServeClient(url, limit=1) as client:
        waiting = asyncio.create_task(client.wait_ready(3600, trouble=told.put_nowait))
        try:
            return await told.get()
        finally:
            assert not waiting.done()
            waiting.cancel()


async def test_the_first_trouble_is_told_while_waiting_goes_on() -> None:
    async def unauthorized(request: web.Request) -> web.Response:
        if request.path == "/healthz":
            return web.Response()
        return web.json_response({"error": {"type": "X", "message": "no such token"}}, status=401)

    (port,) = free_ports(1)
    refused = await trouble_of(f"http://127.0.0.1:{port}")
    assert refused == f"http://127.0.0.1:{port}: connection refused"
    nameless = await trouble_of("http://policy.invalid:8000")
    assert "policy.invalid:8000" in nameless
    assert "DNS" in nameless
    async with serving(unauthorized) as url:
        assert await trouble_of(url) == f"{url} answered 401: no such token"


async def test_a_replica_that_does_not_answer_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    absent = f"http://127.0.0.1:{port}"
    with caplog.at_level(logging.WARNING, "kuberoll_workers.policy.routing.router"):
        async with replicas(1) as made, routed(StaticDiscovery([made[0].url, absent])) as policy:
            await until(lambda: absent in caplog.text)
            # Each answer stirs nothing, each failure does: the list is looked at again and again.
            for turn in range(20):
                await answer(policy, "0-0-0", turn)
                policy._wake.set()
                await asyncio.sleep(0)
            await policy._discover()
            await until(lambda: not policy._joining)
    assert caplog.text.count(absent) == 1
