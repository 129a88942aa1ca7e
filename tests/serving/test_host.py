"""The host as a process: what it says, and what it leaves behind when it ends early."""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.local.watchdog import processes_of
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import GenerationRequest, PolicyUnavailable, SamplingParameters
from tests.serving.hosts import PATIENCE_SECONDS, starting, until_ready

pytestmark = pytest.mark.ray


def test_a_failed_start_says_why_and_leaves_nothing() -> None:
    with starting(simulated={"responses": ["x"]}, tokenizer="/nowhere/at-all") as host:
        events = list(iter(host.event, None))
        assert [event["event"] for event in events] == ["phase", "phase", "failed"], events[-1]
        assert "/nowhere/at-all" in events[-1]["message"]
        assert "Traceback" not in events[-1]["message"]
        assert host.process.wait(timeout=PATIENCE_SECONDS) == 1
        assert host.left() == []


def test_every_process_of_a_host_is_found_by_the_id_of_its_run() -> None:
    with starting() as host:
        until_ready(host)
        below = psutil.Process(host.process.pid).children(recursive=True)
        found = set(processes_of(host.run_id))
        assert len(below) > 5
        lost = [process for process in below if process not in found and process.is_running()]
        assert [process.cmdline() for process in lost if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("how", ["signal", "closed input"])
def test_a_host_that_is_told_to_end_while_it_starts_leaves_nothing(how: str) -> None:
    with starting() as host:
        event = host.event()
        assert event is not None
        assert (event["event"], event["name"]) == ("phase", "ray")
        if how == "signal":
            host.process.send_signal(signal.SIGTERM)
        else:
            assert host.process.stdin is not None
            host.process.stdin.close()
        events = list(iter(host.event, None))
        assert all(event["event"] == "phase" for event in events)
        host.process.wait(timeout=PATIENCE_SECONDS)
        assert host.left() == []


async def test_a_caller_that_goes_away_ends_its_request_and_a_stopped_host_leaves_nothing() -> None:
    with starting(simulated={"firstTokenSeconds": 600}) as host:
        *phases, ready = until_ready(host)
        assert [phase["name"] for phase in phases] == ["ray", "serve", "engine", "proxy"]
        async with ServeClient(ready["url"], limit=64) as client, asyncio.timeout(PATIENCE_SECONDS):
            tasks = [asyncio.create_task(client.generate(_request(number))) for number in range(8)]
            while (await client.info()).ongoing_requests < len(tasks):
                assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while (await client.info()).ongoing_requests:
                pass
        host.process.send_signal(signal.SIGTERM)
        assert host.process.wait(timeout=PATIENCE_SECONDS) == 0
        assert host.left() == []


async def test_a_host_whose_requests_nobody_waits_for_ends_with_them() -> None:
    with starting(simulated={"firstTokenSeconds": 600}, drains=False, drain_seconds=600) as host:
        url = until_ready(host)[-1]["url"]
        async with ServeClient(url, limit=2) as client, asyncio.timeout(PATIENCE_SECONDS):
            task = asyncio.create_task(client.generate(_request(0)))
            while not (await client.info()).ongoing_requests:
                assert not task.done()
            host.process.send_signal(signal.SIGTERM)
            with pytest.raises(PolicyUnavailable):
                await task
        assert host.process.wait(timeout=PATIENCE_SECONDS) == 0
        assert host.left() == []


def _request(number: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(number),
        session_id=str(number),
        token_ids=token_array([1, 2]),
        sampling=SamplingParameters(max_tokens=5),
    )
