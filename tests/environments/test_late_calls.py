"""Calls that exceed their time in the worker's own process: what they keep, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest

from kuberoll_workers.environments.batches import StepBatch
from kuberoll_workers.environments.inline import MAX_ABANDONED_THREADS
from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.outcome import EnvironmentFault, StepOutcome, StepRaised, StepTimedOut
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.environments.tools import ToolEnvironment, tool
from kuberoll_workers.rollouts.scheduling import run_rollout
from tests.rollouts.fakes import rollout_of, sample, until


def returned(size: int, *, ends: bool = True) -> EnvironmentReturn:
    return EnvironmentReturn(
        [{"role": "environment", "content": "well"}] * size, None, None, [1.0] * size, [ends] * size
    )


class Plain:
    """Waits for a gate, if its row has one; knows whether two threads have stepped it at a time."""

    crossed = 0

    def __init__(self, gates: dict[str, threading.Event] | None = None) -> None:
        self.gates = gates or {}
        self.inside = 0

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        self.inside += 1
        type(self).crossed += self.inside > 1
        for state in metadata:
            if (gate := self.gates.get(state.get("gate", ""))) is not None:
                gate.wait()
        self.inside -= 1
        return returned(len(logs))

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


def one(**state: Any) -> StepBatch:
    return StepBatch.of_columns([[]], [state])


@pytest.mark.parametrize("alone", [False, True])
async def test_hung_calls_that_have_returned_free_their_places(alone: bool) -> None:
    """A hundred times the limit, one after the other; with one instance only, too."""
    gate = threading.Event()
    only = Plain({"a": gate})
    made = make_executor(
        (lambda: only) if alone else (lambda: Plain({"a": gate})), isolation="Inline", processes=1, timeout=0.001
    )
    Plain.crossed = 0
    for _ in range(MAX_ABANDONED_THREADS * 100 if not alone else 100):
        gate.clear()
        with pytest.raises(StepTimedOut):
            await made.run(one(gate="a"))
        gate.set()
    made.timeout = 60.0  # type: ignore[misc]
    results: Any = None
    while results is None:
        # It may still be on its way out of the last one.
        with contextlib.suppress(StepTimedOut):
            results = await made.run(one())
    assert results[0].reward == 1.0
    # The only one is in two calls beside one that hangs for longer, which on a busy machine may be.
    assert alone or Plain.crossed == 0
    await made.close()


async def test_calls_that_hang_at_a_time_are_bounded() -> None:
    gate = threading.Event()
    made = make_executor(lambda: Plain({"a": gate}), isolation="Inline", processes=1, timeout=0.01)
    said: list[str] = []
    for _ in range(MAX_ABANDONED_THREADS + 3):
        with pytest.raises(StepTimedOut) as late:
            await made.run(one(gate="a"))
        said.append(str(late.value))
    assert f"{MAX_ABANDONED_THREADS + 1} calls of this environment hang" in said[-1]
    gate.set()
    made.timeout = 60.0  # type: ignore[misc]
    results: Any = None
    while results is None:
        with contextlib.suppress(StepTimedOut):
            results = await made.run(one())
    assert results[0].reward == 1.0
    await made.close()


@pytest.mark.parametrize("fails", [True, False], ids=["its constructor raises", "the call is cancelled"])
async def test_an_instance_that_does_not_come_leaves_no_thread(fails: bool) -> None:
    gate, constructing, go_on = threading.Event(), threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def make() -> Plain:
        threads.append(threading.current_thread())
        if len(threads) > 1:
            constructing.set()
            if fails:
                raise OSError("no more of them")
            go_on.wait()
        return Plain({"a": gate})

    made = make_executor(make, isolation="Inline", processes=1, timeout=0.01)
    with pytest.raises(StepTimedOut):
        await made.run(one(gate="a"))
    call = asyncio.create_task(made.run(one()))
    await asyncio.to_thread(constructing.wait)
    if fails:
        with pytest.raises(EnvironmentFault, match="no more of them"):
            await call
    else:
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    go_on.set()
    threads[-1].join(60)
    assert not threads[-1].is_alive()
    gate.set()
    await made.close()


async def test_a_late_call_says_where_it_is() -> None:
    gate = threading.Event()
    made = make_executor(lambda: Plain({"a": gate}), isolation="Inline", processes=1, timeout=3.0)
    with pytest.raises(StepTimedOut) as late:
        await made.run(one(gate="a"))
    gate.set()
    assert late.value.traceback is not None
    assert late.value.traceback.frames[0].function == "step"
    await made.close()


@pytest.mark.slow
async def test_a_step_that_is_short_for_each_trajectory_fails_none_of_them() -> None:
    """120 rows of 10 ms in lockstep are 1.2 s, and the limit is 0.8 s."""

    class Slow(Plain):
        def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            time.sleep(0.01 * len(logs))
            states = [{"turns": state["turns"] - 1} for state in metadata]
            return returned(len(logs))._replace(metadata=states, terminateds=[state["turns"] <= 0 for state in states])

    runner = EnvironmentRunner(make_executor(Slow, isolation="Inline", processes=1, timeout=0.8), max_batch=256)
    results: list[Any] = []

    async def sink(result: Any) -> None:
        results.append(result)

    rollout = rollout_of({"env": runner}, concurrency=120, scheduling="Lockstep", max_turns=20)
    await run_rollout(rollout, [sample(index, metadata={"turns": 8}) for index in range(120)], sink)
    await runner.close()
    assert [result.stop_reason for result in results] == ["terminated"] * 120


class OnALoop(Plain):
    """Does what a row says to its event loop."""

    async def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:  # type: ignore[override]
        (state,) = metadata
        match state.get("do"):
            case "block":
                self.gates["block"].wait()
            case "stop":
                asyncio.get_running_loop().stop()
            case "cancel":
                for task in asyncio.all_tasks():
                    task.cancel()
            case "swallow":
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()
            case "wait":
                for _ in range(5):
                    await asyncio.sleep(0.001)
        return returned(1)


def on_a_loop(timeout: float, gate: threading.Event | None = None) -> Any:
    gates = {"block": gate or threading.Event()}
    return make_executor(lambda: OnALoop(gates), isolation="Inline", processes=1, timeout=timeout)


async def test_who_blocks_the_loop_fails_alone_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    made = on_a_loop(1.5, gate)
    runner = EnvironmentRunner(made, max_batch=8)
    try:
        states = [{"do": "wait"}, {"do": "block"}, *({"do": "wait"} for _ in range(5))]
        results = await runner.step_batch([[]] * 7, states)
    finally:
        gate.set()
    blocked = results.pop(1)
    assert isinstance(blocked, StepTimedOut)
    assert blocked.traceback is not None
    assert blocked.traceback.frames[0].function == "step"
    assert all(isinstance(result, StepOutcome) for result in results)
    assert "blocks its event loop" in caplog.text
    assert "in step" in caplog.text
    assert isinstance(await runner.step([], {}), StepOutcome)
    await runner.close()


@pytest.mark.parametrize("act", ["stop", "cancel"])
async def test_what_a_step_does_to_its_loop_is_its_own(act: str) -> None:
    runner = EnvironmentRunner(on_a_loop(60.0), max_batch=8)
    results = await runner.step_batch([[]] * 6, [{"do": "wait"}, {"do": act}, *({"do": "wait"} for _ in range(4))])
    # One that has cancelled itself may return nevertheless.
    assert isinstance(results.pop(1), StepOutcome if act == "stop" else StepOutcome | StepRaised)
    assert all(isinstance(result, StepOutcome) for result in results)
    assert isinstance(await runner.step([], {}), StepOutcome)
    await runner.close()


async def test_a_step_that_cannot_be_cancelled_keeps_nobody() -> None:
    runner = EnvironmentRunner(on_a_loop(0.05), max_batch=8)
    with pytest.raises(StepTimedOut) as late:
        await runner.step([], {"do": "swallow"})
    assert late.value.traceback is not None
    assert late.value.traceback.frames[0].function == "step"
    await runner.close()


async def test_the_end_of_the_waiting_cancels_the_step() -> None:
    class Patient(Plain):
        begun = cancelled = False

        async def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:  # type: ignore[override]
            type(self).begun = True
            try:
                await asyncio.Event().wait()
            finally:
                type(self).cancelled = True
            raise AssertionError

    made = make_executor(Patient, isolation="Inline", processes=1, timeout=60.0)
    call = asyncio.create_task(made.run(one()))
    await until(lambda: Patient.begun)
    call.cancel()
    await until(lambda: Patient.cancelled)
    await made.close()


class Tools(ToolEnvironment):
    """A tool that does not return."""

    @tool
    def look_up(self, word: str) -> str:
        """Look a word up."""
        while word:
            time.sleep(0.01)
        return word


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_a_hung_tool_is_named_with_its_stack(isolation: str) -> None:
    spec = PlainSpec(name="env", type=None, entrypoint=f"{__name__}:Tools", config={})
    runner = EnvironmentRunner(make_executor(spec, isolation=isolation, processes=1, timeout=3.0), max_batch=8)
    call = {"id": "a", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "x"}'}}
    with pytest.raises(StepTimedOut, match=r"step took longer .*, in the tool 'look_up'") as late:
        await runner.step([{"role": "assistant", "content": "", "tool_calls": [call]}], {})
    stack = late.value.traceback
    assert stack is not None
    assert stack.frames[0].function == "look_up"
    assert stack.frames[0].source in ("time.sleep(0.01)", "while word:")
    await runner.close()
