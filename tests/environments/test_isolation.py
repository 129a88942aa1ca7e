"""Environments in child processes: their own interpreter, killed when they hang, replaced when they die."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.outcome import StepOutcome, StepRaised, StepTimedOut
from kuberoll_workers.environments.runner import EnvironmentRunner


class Obedient:
    """Does what each episode's metadata says; answers with its process id."""

    def __init__(self, greeting: str) -> None:
        self._greeting = greeting

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        for state in metadata:
            if state["do"] == "hang":
                time.sleep(3600)
            if state["do"] == "die":
                os._exit(3)
            if state["do"] == "raise":
                raise ValueError("as told")
        size = len(logs)
        observations = [{"role": "environment", "content": f"{self._greeting} {os.getpid()}"}] * size
        return EnvironmentReturn(observations, [None] * size, None, [1.0] * size, [True] * size)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


@pytest.fixture
async def runner() -> AsyncIterator[EnvironmentRunner]:
    executor = make_executor(functools.partial(Obedient, "hello"), isolation="Process", processes=2, timeout=5.0)
    made = EnvironmentRunner(executor, max_batch=8)
    try:
        yield made
    finally:
        await made.close()


def _pid(outcome: StepOutcome) -> int:
    greeting, pid = outcome.content.split()
    assert greeting == "hello"
    return int(pid)


async def test_steps_run_in_other_processes(runner: EnvironmentRunner) -> None:
    outcomes = await asyncio.gather(*(runner.step([], {"do": "work"}) for _ in range(40)))
    assert os.getpid() not in {_pid(outcome) for outcome in outcomes}


@pytest.mark.parametrize(("order", "fault"), [("hang", StepTimedOut), ("die", StepRaised), ("raise", StepRaised)])
async def test_a_bad_episode_harms_no_other(runner: EnvironmentRunner, order: str, fault: type[Exception]) -> None:
    orders = ["work", order, "work", "work"]
    results = await asyncio.gather(*(runner.step([], {"do": do}) for do in orders), return_exceptions=True)
    assert isinstance(results[1], fault)
    for index in (0, 2, 3):
        assert isinstance(results[index], StepOutcome)
    # The environment goes on.
    assert (await runner.step([], {"do": "work"})).reward == 1.0


async def test_closing_leaves_no_process(runner: EnvironmentRunner) -> None:
    import psutil

    pid = _pid(await runner.step([], {"do": "work"}))
    await runner.close()
    assert not psutil.pid_exists(pid)
