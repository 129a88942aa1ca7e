"""Steps that hang in child processes: the other trajectories of their environment go on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.outcome import StepOutcome, StepRaised, StepTimedOut
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from tests.rollouts.fakes import until

pytestmark = pytest.mark.slow


class Hanging:
    """Hangs, raises or answers, as each episode's metadata says; leaves a file when it begins to hang."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._notes = Path(config["notes"])

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        for state in metadata:
            if state["do"] == "hang":
                (self._notes / f"{state['name']}-{os.getpid()}").touch()
                time.sleep(3600)
            if state["do"] == "raise":
                raise ValueError("as told")
        size = len(logs)
        observations = [{"role": "environment", "content": str(os.getpid())}] * size
        return EnvironmentReturn(observations, [None] * size, None, [1.0] * size, [True] * size)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


@asynccontextmanager
async def hanging(notes: Path, *, limit: float) -> AsyncIterator[EnvironmentRunner]:
    spec = PlainSpec(name="hanging", type=None, entrypoint=f"{__name__}:Hanging", config={"notes": str(notes)})
    files = ProcessAccess(writable=[str(notes)], readable=[str(notes)])
    executor = make_executor(spec, isolation="Process", processes=1, timeout=limit, spare=2, access=files)
    runner = EnvironmentRunner(executor, max_batch=256)
    try:
        yield runner
    finally:
        await runner.close()


def step(runner: EnvironmentRunner, do: str, name: str = "") -> asyncio.Task[StepOutcome]:
    return asyncio.create_task(runner.step([{"role": "user", "content": "hi"}], {"do": do, "name": name}))


def hangs(notes: Path, name: str) -> bool:
    return any(notes.glob(f"{name}-*"))


def keepers() -> int:
    """Number of processes of environments that this process has."""
    count = 0
    for child in psutil.Process().children():
        # One that has just ended has no command line.
        with contextlib.suppress(psutil.Error):
            count += "kuberoll_workers.environments.keeper" in child.cmdline()
    return count


async def test_others_go_to_a_spare_process_while_a_step_hangs(tmp_path: Path) -> None:
    async with hanging(tmp_path, limit=60.0) as runner:
        await step(runner, "answer")
        stuck = step(runner, "hang", "a")
        await until(lambda: hangs(tmp_path, "a"))
        outcomes = await asyncio.gather(*(step(runner, "answer") for _ in range(8)))
        assert {outcome.reward for outcome in outcomes} == {1.0}
        assert not stuck.done()
        stuck.cancel()


async def test_hanging_rows_of_a_batch_fail_after_all_others_have_answered(tmp_path: Path) -> None:
    ended: list[str] = []
    async with hanging(tmp_path, limit=2.0) as runner:
        # One batch, with those that hang in front.
        orders = ["hang"] * 8 + ["answer"] * 56
        steps = [step(runner, order) for order in orders]
        for order, one in zip(orders, steps, strict=True):
            one.add_done_callback(functools.partial(lambda order, _: ended.append(order), order))
        results = await asyncio.gather(*steps, return_exceptions=True)
    assert ended == ["answer"] * 56 + ["hang"] * 8
    assert all(isinstance(result, StepTimedOut) for result in results[:8])
    assert all(isinstance(result, StepOutcome) for result in results[8:])


async def test_a_step_that_hung_is_repeated_beside_the_others(tmp_path: Path) -> None:
    async with hanging(tmp_path, limit=60.0) as runner:
        stuck = asyncio.create_task(runner.step([], {"do": "hang", "name": "a"}, hung=True))
        await until(lambda: hangs(tmp_path, "a"))
        await step(runner, "answer")
        assert not stuck.done()
        stuck.cancel()


async def test_the_number_of_processes_is_bounded_and_returns_to_the_usual_one(tmp_path: Path) -> None:
    async with hanging(tmp_path, limit=20.0) as runner:
        # After an answer it is known soon that a step hangs; all three have to begin within the first one's limit.
        await step(runner, "answer")
        stuck = []
        for name in "abc":
            stuck.append(step(runner, "hang", name))
            await until(functools.partial(hangs, tmp_path, name))
        waits = step(runner, "answer")
        assert keepers() == 3
        assert not waits.done()
        await asyncio.gather(*stuck, return_exceptions=True)
        await waits
        await until(lambda: keepers() <= 1)


async def test_rows_that_raise_and_hang_in_one_batch_are_told_apart(tmp_path: Path) -> None:
    async with hanging(tmp_path, limit=2.0) as runner:
        steps = [step(runner, do) for do in ("raise", "answer", "hang", "answer")]
        raised, first, hung, second = await asyncio.gather(*steps, return_exceptions=True)
    assert isinstance(raised, StepRaised)
    assert isinstance(hung, StepTimedOut)
    assert isinstance(first, StepOutcome)
    assert isinstance(second, StepOutcome)
