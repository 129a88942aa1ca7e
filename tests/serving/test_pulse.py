"""When an engine counts as stalled."""

from __future__ import annotations

import asyncio

import pytest

from kuberoll_workers.serving.engines.pulse import EngineStalled, Pulse
from tests.rollouts.fakes import until


class Core:
    """What answers calls as long as it goes on."""

    def __init__(self) -> None:
        self.going = asyncio.Event()
        self.calls = 0

    async def call(self) -> None:
        self.calls += 1
        await self.going.wait()


async def stalled(pulse: Pulse) -> EngineStalled:
    async with asyncio.timeout(60):
        while True:
            try:
                pulse.check()
            except EngineStalled as error:
                return error
            await asyncio.sleep(0)


async def test_one_call_waits_at_a_time_and_its_answer_ends_the_stall() -> None:
    core = Core()
    pulse = Pulse(core.call, stall_seconds=0.01)
    assert (await stalled(pulse)).seconds > 0.01
    await stalled(pulse)
    assert core.calls == 1
    core.going.set()
    await until(lambda: pulse._waiting is None)
    for number in range(2, 5):
        pulse.check()
        await until(lambda: pulse._waiting is None)
        assert core.calls == number


async def test_work_that_takes_longer_than_a_step_is_no_stall() -> None:
    core = Core()
    pulse = Pulse(core.call, stall_seconds=0.01)
    await stalled(pulse)
    pulse.stop()
    # The next one counts from now.
    pulse.check()
    await asyncio.sleep(0)
    assert core.calls == 2
    await stalled(pulse)
    pulse.stop()
    pulse.stop()


async def test_an_engine_that_fails_calls_is_not_stalled() -> None:
    async def call() -> None:
        raise RuntimeError("dead")

    pulse = Pulse(call, stall_seconds=0.0)
    for _ in range(3):
        pulse.check()
        await until(lambda: pulse._waiting is None)


@pytest.mark.parametrize("seconds", [8.4, 119.6])
def test_its_message_says_since_when(seconds: float) -> None:
    assert str(EngineStalled(seconds)) == f"the engine has made no step for {seconds:.0f} s"
