"""Real vLLM on a CPU whose process is killed: what is said of it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from kuberoll_workers.local.watchdog import processes_of
from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.serving.engines.vllm_engine import VLLMEngine
from tests.serving.hosts import StartingHost, starting

pytestmark = pytest.mark.engine

TINY = str(Path(__file__).parents[2] / "examples" / "models" / "tiny-policy")
ARGUMENTS = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 27}


class DyingEngine(VLLMEngine):
    """Its process is killed just before the first request."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(model=TINY, tokenizer=TINY, revision=None, engine_args=ARGUMENTS)
        self._number = number

    async def _probe(self) -> None:
        for process in self._processes:
            assert process.pid is not None
            psutil.Process(process.pid).send_signal(self._number)
        await super()._probe()


each_signal = pytest.mark.parametrize("number", [signal.SIGILL, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])


@each_signal
async def test_an_engine_that_dies_in_its_first_request_says_of_what(number: signal.Signals) -> None:
    engine = DyingEngine(number)
    try:
        with pytest.raises(
            PolicyUnavailable, match=rf"EngineCore\S* was killed by signal {number:d} \({number.name}\)"
        ):
            await engine.start()
        with pytest.raises(PolicyUnavailable, match=number.name):
            await engine.check_health()
    finally:
        await engine.shutdown()


def kill(host: StartingHost, title: str, number: signal.Signals, ended: threading.Event) -> None:
    """Kill all processes of that title until the host has ended.

    A single one may be a child that the process has forked, and that has its title until it runs a program.
    """
    while not ended.wait(0.02):
        for process in processes_of(host.run_id):
            with contextlib.suppress(psutil.Error):
                if title in " ".join([process.name(), *process.cmdline()]):
                    process.send_signal(number)


async def last_event(host: StartingHost, title: str, number: signal.Signals) -> dict[str, Any]:
    """What a host says at last if one of its processes is killed."""
    ended = threading.Event()
    killing = asyncio.create_task(asyncio.to_thread(kill, host, title, number, ended))
    try:
        while (event := await asyncio.to_thread(host.event)) is not None and event["event"] == "phase":
            pass
    finally:
        ended.set()
        await killing
    assert event is not None
    return event


@each_signal
async def test_a_host_whose_engine_is_killed_as_it_starts_says_of_what(number: signal.Signals) -> None:
    with starting(model=TINY, tokenizer=TINY, engine="VLLM", engine_args=ARGUMENTS) as host:
        event = await last_event(host, "EngineCore", number)
    assert event["event"] == "failed"
    assert f"EngineCore was killed by signal {number:d} ({number.name})" in event["message"]


@pytest.mark.long
async def test_a_host_whose_replica_is_killed_as_it_starts_says_of_what() -> None:
    with starting(model=TINY, tokenizer=TINY, engine="VLLM", engine_args=ARGUMENTS) as host:
        event = await last_event(host, "ray::ServeReplica", signal.SIGKILL)
    assert event["event"] == "failed"
    assert "ServeReplica:kuberoll:Generation" in event["message"]
    assert "SIGKILL" in event["message"]
