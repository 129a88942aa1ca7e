"""The host as a process: what it says, and what it leaves behind when it ends early."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.local.watchdog import RUN_ID_VARIABLE, end_processes, processes_of
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import GenerationRequest, SamplingParameters

PATIENCE_SECONDS = 120


class StartingHost:
    """A host whose events are read one by one."""

    def __init__(self, scratch: Path, **app: Any) -> None:
        self.run_id = uuid.uuid4().hex
        config = scratch / "config.json"
        settings = {"model": "none", "tokenizer": "none", "engine": "Simulated", "simulated": {}, **app}
        config.write_text(json.dumps({"app": settings, "scratch": str(scratch)}))
        with (scratch / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kuberoll_workers.policy.host", "--config", str(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, RUN_ID_VARIABLE: self.run_id, "TMPDIR": str(scratch)},
            )

    def event(self) -> dict[str, Any] | None:
        """The next one; None at the end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else None

    def left(self) -> list[str]:
        """Names of its processes that still run."""
        return [process.name() for process in processes_of(self.run_id)]


@contextmanager
def starting(**app: Any) -> Iterator[StartingHost]:
    # Not pytest's directory: the paths of sockets below it would be too long.
    scratch = Path(tempfile.mkdtemp(prefix="kr-", dir="/tmp"))
    host = StartingHost(scratch, **app)
    try:
        yield host
    finally:
        end_processes(host.run_id)
        host.process.wait(timeout=PATIENCE_SECONDS)
        for pipe in (host.process.stdin, host.process.stdout):
            assert pipe is not None
            pipe.close()
        shutil.rmtree(scratch, ignore_errors=True)


def test_a_failed_start_says_why_and_leaves_nothing() -> None:
    with starting(simulated={"responses": ["x"]}, tokenizer="/nowhere/at-all") as host:
        events = list(iter(host.event, None))
        assert [event["event"] for event in events] == ["phase", "phase", "failed"]
        assert "/nowhere/at-all" in events[-1]["message"]
        assert "Traceback" not in events[-1]["message"]
        assert host.process.wait(timeout=PATIENCE_SECONDS) == 1
        assert host.left() == []


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
        *phases, ready = _until_ready(host)
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


def _until_ready(host: StartingHost) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    while (event := host.event()) is not None:
        events.append(event)
        if event["event"] == "ready":
            return events
    raise AssertionError(events)


def _request(number: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(number),
        session_id=str(number),
        token_ids=token_array([1, 2]),
        sampling=SamplingParameters(max_tokens=5),
    )
