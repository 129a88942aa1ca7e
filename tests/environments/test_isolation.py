"""Environments in child processes: their own interpreter, killed when they hang, replaced when they die."""

from __future__ import annotations

import asyncio
import builtins
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kuberoll_api.model.dataset import Dataset
from kuberoll_workers.dataset.reading import DatasetError, read_rows
from kuberoll_workers.environments.batches import StepBatch
from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.outcome import EnvironmentFault, StepInvalid, StepOutcome, StepRaised, StepTimedOut
from kuberoll_workers.environments.processes import ProcessEnvironment
from kuberoll_workers.environments.registry import PlainSpec, UnusableEnvironment
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.pods.exit_codes import is_permanent

pytestmark = pytest.mark.slow


class Obedient:
    """Does what each episode's metadata says; answers with its process id."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._greeting = config["greeting"]

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
    spec = PlainSpec(name="obedient", type=None, entrypoint=f"{__name__}:Obedient", config={"greeting": "hello"})
    executor = make_executor(spec, isolation="Process", processes=2, timeout=5.0)
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
    pid = _pid(await runner.step([], {"do": "work"}))
    await runner.close()
    assert not psutil.pid_exists(pid)


class Making:
    """Makes rows, or does what its config says."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        if config.get("exit"):
            sys.exit("not today")
        if raised := config.get("raises"):
            raise getattr(builtins, raised)("limit")
        if config.get("die"):
            os._exit(7)

    def step(self, logs: list[Any], metadata: list[Any]) -> Any:
        raise AssertionError

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        raise AssertionError

    def generate_dataset(self, count: int, seed: int) -> Any:
        for number in range(count):
            if number == self._config.get("bad"):
                yield {"metadata": {"n": {1, 2}}}
            if number == self._config.get("dies"):
                os._exit(9)
            yield {"prompt": f"{seed + number}", "metadata": {"pid": os.getpid()}}


def made(**config: Any) -> ProcessEnvironment:
    return ProcessEnvironment(PlainSpec(name="env", type=None, entrypoint=f"{__name__}:Making", config=config))


def test_rows_are_made_in_another_process() -> None:
    rows = list(made().generate_dataset(600, 5))
    assert [row["prompt"] for row in rows] == [str(number) for number in range(5, 605)]
    (pid,) = {row["metadata"]["pid"] for row in rows}
    assert pid != os.getpid()
    assert not psutil.pid_exists(pid)


def test_rows_that_cannot_be_made_are_a_fault() -> None:
    with pytest.raises(StepInvalid, match=r"generated row 300\.metadata\.n is set"):
        list(made(bad=300).generate_dataset(301, 0))
    with pytest.raises(StepRaised, match="the environment's process ended"):
        list(made(dies=0).generate_dataset(1, 0))
    source = Dataset.model_validate({"source": {"generator": {"count": 1}}})
    with pytest.raises(DatasetError, match=r"environment 'env': generated row 0\.metadata\.n is set"):
        list(read_rows(source, base=Path("/"), task_names=["env"], environment=lambda _: made(bad=0)))


@pytest.mark.parametrize(("name", "kind"), [("KeyError", StepInvalid), ("ConnectionResetError", StepRaised)])
def test_only_a_constructor_that_will_fail_again_is_a_fault_of_the_configuration(
    name: str, kind: type[EnvironmentFault]
) -> None:
    with pytest.raises(UnusableEnvironment, match=f"its constructor raised {name}: 'limit'|{name}: limit") as caught:
        made(raises=name).check()
    assert type(caught.value.__cause__) is kind
    assert caught.value.traceback is not None
    assert is_permanent(caught.value) is (kind is StepInvalid)


@pytest.mark.parametrize(
    ("config", "words"), [({"exit": 1}, "its constructor raised SystemExit: not today"), ({"die": 1}, "process ended")]
)
async def test_an_environment_that_cannot_be_made_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableEnvironment, match=f"environment 'env': .*{words}"):
        made(**config).check()
    spec = PlainSpec(name="env", type=None, entrypoint=f"{__name__}:Making", config=config)
    executor = make_executor(spec, isolation="Process", processes=1, timeout=5.0)
    with pytest.raises(StepRaised, match=r"environment 'env': .*(not today|exit code 7)"):
        await executor.run(StepBatch.of_columns([[]], [None]))
    await executor.close()


def test_environments_end_with_their_worker() -> None:
    """A worker that is killed leaves none of them behind."""
    program = f"""
import asyncio
from kuberoll_workers.environments.processes import ProcessExecutor
from kuberoll_workers.environments.batches import StepBatch
from kuberoll_workers.environments.registry import PlainSpec, UnusableEnvironment

async def main():
    spec = PlainSpec(name="env", type=None, entrypoint="{__name__}:Obedient", config={{"greeting": "hello"}})
    outcomes = await ProcessExecutor(spec, processes=1, timeout=60).run(
        StepBatch.of_columns([[]], [{{"do": "work"}}])
    )
    print(outcomes[0].content.split()[1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    worker = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert worker.stdout is not None
    child = psutil.Process(int(worker.stdout.readline()))
    keeper = child.parent()
    assert keeper is not None
    worker.kill()
    worker.communicate()
    _, alive = psutil.wait_procs([child, keeper], timeout=60)
    assert not alive


class Counting:
    """Coroutine environment that counts its calls under way."""

    parallel_steps = 2

    def __init__(self) -> None:
        self.now = self.most = self.largest = 0

    async def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        self.now += 1
        self.most, self.largest = max(self.most, self.now), max(self.largest, len(metadata))
        await asyncio.sleep(0)
        self.now -= 1
        count = len(metadata)
        return EnvironmentReturn([{"content": ""}] * count, metadata, None, [1.0] * count, [True] * count)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


async def test_a_coroutine_environment_limits_its_calls() -> None:
    environment = Counting()
    executor = make_executor(lambda: environment, isolation="Inline", processes=1, timeout=60)
    runner = EnvironmentRunner(executor, max_batch=8)
    outcomes = await runner.step_batch([[]] * 20, [{}] * 20)
    await runner.close()
    assert [getattr(outcome, "reward", outcome) for outcome in outcomes] == [1.0] * 20
    # Without the attribute all 20 are under way at once.
    assert (environment.most, environment.largest) == (2, 1)
