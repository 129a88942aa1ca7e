"""Environments in Ray actors: awaited without a thread, cancelled or abandoned when they hang, with their own words."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kuberoll_workers.adapters.nemo_rl.actors import MAX_ABANDONED_CALLS, ActorExecutor, executor_for
from kuberoll_workers.environments.batches import StepBatch
from kuberoll_workers.environments.inline import CoroutineExecutor, InlineExecutor
from kuberoll_workers.environments.interface import EnvironmentReturn, UnusableRow
from kuberoll_workers.environments.outcome import RowFault, StepOutcome, StepRaised, StepTimedOut
from kuberoll_workers.environments.runner import EnvironmentRunner
from tests.environments.ray_actors import Renewed, actor_pool


class Unpicklable(Exception):
    """Cannot leave the process that it was raised in."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def returned(size: int) -> EnvironmentReturn:
    observations = [{"role": "environment", "content": "ok"}] * size
    return EnvironmentReturn(observations, [None] * size, None, [1.0] * size, [True] * size)


class Obedient(Renewed):
    """Does what each episode's metadata says, and remembers the sizes of its batches."""

    def __init__(self) -> None:
        self._release = threading.Event()
        self._sizes: list[int] = []

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        self._sizes.append(len(logs))
        for state in metadata:
            match state["do"]:
                case "hang":
                    self._release.wait()
                case "die":
                    os._exit(1)
                case "raise":
                    raise ValueError("as told")
                case "raise unpicklable":
                    raise Unpicklable("as told, with a lock")
                case "refuse":
                    raise UnusableRow("metadata.answer is missing")
                case "time out":
                    raise TimeoutError("the judge did not answer")
        return returned(len(logs))

    def sizes(self) -> list[int]:
        return self._sizes

    def release(self) -> None:
        self._release.set()


@asynccontextmanager
async def running(environment: Any, *, seconds: float = 60.0, calls: int = 1) -> AsyncIterator[EnvironmentRunner]:
    runner = EnvironmentRunner(executor_for(environment, timeout=seconds, calls_in_flight=calls), max_batch=64)
    try:
        yield runner
    finally:
        await runner.close()


@pytest.fixture(scope="module")
def actors(ray: Any) -> Iterator[Callable[[], Any]]:
    with actor_pool(ray, Obedient) as maker:
        yield maker


@pytest.fixture
def environment(actors: Any) -> Any:
    return actors()()


async def steps(runner: EnvironmentRunner, *orders: str) -> list[StepOutcome | BaseException]:
    return await asyncio.gather(*(runner.step([], {"do": order}) for order in orders), return_exceptions=True)


async def test_what_waits_travels_together_and_no_thread_waits_for_it(environment: Any) -> None:
    async with running(environment) as runner:
        await runner.step([], {"do": "work"})
        threads = threading.active_count()
        outcomes = await steps(runner, *["work"] * 32)
        assert threading.active_count() == threads
    assert all(isinstance(outcome, StepOutcome) for outcome in outcomes)
    assert await environment.sizes.remote() == [1, 32]


async def test_several_calls_in_flight_share_what_waits(environment: Any) -> None:
    async with running(environment, calls=4) as runner:
        await steps(runner, *["work"] * 32)
    sizes = await environment.sizes.remote()
    assert sum(sizes) == 32
    assert max(sizes) == 8


@pytest.mark.parametrize(
    ("order", "fault", "words"),
    [
        ("raise", StepRaised, "step raised ValueError: as told"),
        ("raise unpicklable", StepRaised, "as told, with a lock"),
        ("time out", StepRaised, "step raised TimeoutError: the judge did not answer"),
        ("refuse", RowFault, "metadata.answer is missing"),
    ],
)
async def test_an_exception_in_the_actor_is_told_in_its_own_words(
    environment: Any, order: str, fault: type[Exception], words: str
) -> None:
    async with running(environment) as runner:
        results = await steps(runner, "work", order, "work")
    assert type(results[1]) is fault
    assert words in str(results[1])
    assert [type(results[0]), type(results[2])] == [StepOutcome, StepOutcome]


@pytest.mark.parametrize("order", ["raise", "raise unpicklable"])
async def test_an_exception_in_the_actor_has_the_lines_of_its_own_code(environment: Any, order: str) -> None:
    async with running(environment) as runner:
        (raised,) = await steps(runner, order)
    assert isinstance(raised, StepRaised)
    assert raised.traceback is not None
    last = raised.traceback.frames[-1]
    assert (last.file, last.function, last.source[:5]) == (__file__, "step", "raise")
    assert "as told" in raised.traceback.text


async def test_an_actor_that_dies_is_a_fault(ray: Any) -> None:
    environment = ray.remote(Obedient).options(num_cpus=0).remote()
    async with running(environment) as runner:
        await runner.step([], {"do": "work"})
        # Unavailable is what Ray says where word of the death takes longer than a second to reach the caller.
        with pytest.raises(StepRaised, match=r"Actor(Died|Unavailable)Error"):
            await runner.step([], {"do": "die"})
        with pytest.raises(StepRaised, match=r"Actor(Died|Unavailable)Error"):
            await runner.step([], {"do": "work"})


async def test_a_hanging_actor_is_called_no_more_until_it_answers(ray: Any) -> None:
    environment = ray.remote(Obedient).options(num_cpus=0, max_concurrency=MAX_ABANDONED_CALLS + 1).remote()
    # An actor that has not started yet is slow for another reason.
    await environment.sizes.remote()
    executor = ActorExecutor(environment, timeout=0.2, calls_in_flight=1)
    for _ in range(MAX_ABANDONED_CALLS):
        with pytest.raises(StepTimedOut, match="longer than stepTimeoutSeconds"):
            await executor.run(StepBatch.of_columns([[]], [{"do": "hang"}]))
    with pytest.raises(StepTimedOut, match=r"still works on 4 calls"):
        await executor.run(StepBatch.of_columns([[]], [{"do": "work"}]))
    await environment.release.remote()
    while True:
        try:
            assert len(await executor.run(StepBatch.of_columns([[]], [{"do": "work"}]))) == 1
            break
        except StepTimedOut:
            # Until the first of them has answered.
            await asyncio.sleep(0)
    await executor.close()
    ray.kill(environment)


async def test_a_coroutine_actor_that_hangs_is_cancelled(ray: Any) -> None:
    class Patient:
        def __init__(self) -> None:
            self._cancelled = 0

        async def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self._cancelled += 1
                raise
            raise AssertionError

        async def ready(self) -> None:
            return None

        async def cancelled(self) -> int:
            while not self._cancelled:  # noqa: ASYNC110 - the test's own time limit ends a wait in vain
                await asyncio.sleep(0)
            return self._cancelled

    environment = ray.remote(Patient).options(num_cpus=0).remote()
    await environment.ready.remote()
    # Long enough for the call to begin in the actor: one that has not begun has nothing to cancel.
    async with running(environment, seconds=3.0) as runner:
        with pytest.raises(StepTimedOut):
            await runner.step([], {})
        assert await environment.cancelled.remote() == 1
    ray.kill(environment)


class Remote:
    """Looks like an actor handle: `step.remote` does what it is given."""

    def __init__(self, remote: Any) -> None:
        self.step = self
        self.remote = remote


async def test_mocks_may_answer_at_once_or_with_a_future_or_an_awaitable() -> None:
    async def later(logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        await asyncio.sleep(0)
        return returned(len(logs))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for remote in (
            lambda logs, metadata: returned(len(logs)),
            lambda logs, metadata: pool.submit(returned, len(logs)),
            later,
        ):
            async with running(Remote(remote)) as runner:
                assert [type(outcome) for outcome in await steps(runner, "work", "work")] == [StepOutcome] * 2


async def test_a_mock_that_raises_when_called_is_a_fault() -> None:
    def remote(logs: list[Any], metadata: list[Any]) -> Any:
        raise RuntimeError("no cluster")

    async with running(Remote(remote)) as runner:
        with pytest.raises(StepRaised, match="step raised RuntimeError: no cluster"):
            await runner.step([], {})


async def test_a_cancelled_step_takes_its_call_back() -> None:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    executor = executor_for(Remote(lambda logs, metadata: future), timeout=60)
    task = asyncio.create_task(executor.run(StepBatch.of_columns([[]], [{}])))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    assert future.cancelled()
    await executor.close()


def test_each_kind_of_environment_has_its_executor() -> None:
    class Coroutine:
        async def step(self, logs: Any, metadata: Any) -> Any: ...

    assert isinstance(executor_for(Remote(print), timeout=1), ActorExecutor)
    assert isinstance(executor_for(Coroutine(), timeout=1), CoroutineExecutor)
    assert isinstance(executor_for(Obedient(), timeout=1), InlineExecutor)
