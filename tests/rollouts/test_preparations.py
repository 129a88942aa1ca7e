"""Preparations of episodes: each is used once or freed, none too early, and trajectories begin in the usual order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kuberoll_api.ahead import usual_ahead
from kuberoll_workers.data.intervals import IntervalSet
from kuberoll_workers.data.prompts import SampleGroup
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.environments.inline import CoroutineExecutor
from kuberoll_workers.environments.interface import EnvironmentReturn, Episode
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.rollouts.groups import GroupPolicy, Result
from kuberoll_workers.rollouts.pace import Pace
from kuberoll_workers.rollouts.scheduling import run_groups
from tests.rollouts.fakes import CountingEnvironment, ScriptedPolicy, rollout_of, runners, sample
from tests.rollouts.test_run_ahead import Held, group, quiet


class Preparing(CountingEnvironment):
    """Prepares episodes, which have what was prepared once they are reset.

    Attributes:
        held: Names of those that are prepared, and neither reset nor discarded.
        used, freed, begun: Names in the order of the calls.
    """

    def __init__(self, ahead: int | None = 2) -> None:
        super().__init__()
        self.prepare_ahead = ahead
        self.held: list[str] = []
        self.used: list[str] = []
        self.freed: list[str] = []
        self.begun: list[str] = []

    async def prepare(self, episodes: list[Episode]) -> None:
        for episode in episodes:
            assert episode.id not in self.held + self.begun
            assert episode.metadata is not None
            self.held.append(episode.id)

    async def discard(self, names: list[str]) -> None:
        for name in names:
            if name in self.held:
                self.held.remove(name)
                self.freed.append(name)

    async def reset(self, episodes: list[Episode]) -> list[None]:
        for episode in episodes:
            self.begun.append(episode.id)
            if episode.id in self.held:
                self.held.remove(episode.id)
                self.used.append(episode.id)
        return [None] * len(episodes)

    async def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:  # type: ignore[override]
        return super().step(logs, metadata)


class Run:
    """A run of groups, whose policy answers when the test says so."""

    def __init__(self, environment: Any, groups: Any, *, policy: GroupPolicy | None = None, **changes: Any) -> None:
        self.environment = environment
        self.held = Held()
        self.drain = Drain()
        self.pace: Pace | None = changes.pop("pace", None)
        self.results: list[Result] = []
        self.runner = EnvironmentRunner(CoroutineExecutor(environment, timeout=30.0), max_batch=64)
        rollout = rollout_of({"env": self.runner}, policy=self.held, **changes)
        self.task = asyncio.create_task(
            run_groups(rollout, groups, self._sink, policy=policy, drain=self.drain, pace=self.pace)
        )

    async def _sink(self, result: Result) -> None:
        self.results.append(result)

    async def end(self) -> None:
        """Answer all requests, and close the environment."""
        self.held.at_once = True
        while self.held.waiting:
            self.held.answer(0)
        if not self.task.cancelled():
            await self.task
        await self.runner.close()


async def test_the_next_ones_are_prepared_while_others_run() -> None:
    environment = Preparing(2)
    run = Run(environment, [group(0, 3), group(1, 3)], concurrency=2)
    await quiet()
    assert environment.begun == ["0-0-0", "0-1-0"]
    assert environment.held == ["0-2-0", "1-0-0"]
    run.held.answer(0)
    await quiet()
    assert environment.used == ["0-2-0"]
    assert environment.held == ["1-0-0", "1-1-0"]
    await run.end()
    assert environment.used == ["0-2-0", "1-0-0", "1-1-0", "1-2-0"]
    assert (environment.held, environment.freed) == ([], [])


@pytest.mark.parametrize(("ahead", "prepared"), [(0, 0), (3, 3), (None, usual_ahead(9))])
async def test_how_many(ahead: int | None, prepared: int) -> None:
    environment = Preparing(ahead)
    run = Run(environment, [group(index, 1) for index in range(20)], concurrency=9)
    await quiet()
    assert len(environment.begun) == 9
    assert len(environment.held) == prepared
    await run.end()
    assert len(environment.begun) == 20


def test_an_eighth_at_least_one() -> None:
    assert [usual_ahead(places) for places in (1, 8, 9, 64, 1000)] == [1, 1, 2, 8, 125]


async def test_none_whose_consumer_does_not_allow_it_yet() -> None:
    environment, pace = Preparing(4), Pace(max_lag=None, held=True)
    groups = [SampleGroup(samples=(sample(index, metadata={"turns": 1}),), keep=1, order=index) for index in range(6)]
    run = Run(environment, groups, concurrency=1, pace=pace)
    await quiet()
    assert (environment.begun, environment.held) == ([], [])
    pace.update(version=0, room=3, settled=IntervalSet(), stopped=False)
    await quiet()
    assert (environment.begun, environment.held) == (["0-0-0"], ["1-0-0", "2-0-0"])
    # The consumer has all that it needs.
    pace.update(version=0, room=3, settled=IntervalSet(), stopped=True)
    await quiet()
    assert environment.held == []
    await run.end()
    assert environment.begun == ["0-0-0"]
    assert environment.freed == ["1-0-0", "2-0-0"]


async def test_none_beyond_the_groups_that_are_wanted_or_the_source_has() -> None:
    environment = Preparing(8)
    run = Run(
        environment, (group(index, 2) for index in itertools.count()), policy=GroupPolicy(wanted=2), concurrency=1
    )
    await quiet()
    assert environment.held == ["0-1-0", "1-0-0", "1-1-0"]
    await run.end()
    assert len(environment.begun) == 4
    assert environment.freed == []


async def test_samples_that_a_complete_group_needs_no_more_are_freed() -> None:
    environment = Preparing(3)
    run = Run(environment, [group(0, 4, keep=1), group(1, 1)], concurrency=1)
    await quiet()
    assert environment.held == ["0-1-0", "0-2-0", "0-3-0"]
    run.held.answer(0)
    await quiet()
    assert environment.freed == ["0-1-0", "0-2-0", "0-3-0"]
    assert environment.begun == ["0-0-0", "1-0-0"]
    await run.end()


async def test_a_drain_and_the_end_of_a_run_free_at_once_what_waits() -> None:
    stops: list[Callable[[Run], Any]] = [lambda run: run.drain.set(), lambda run: run.task.cancel()]
    for stop in stops:
        environment = Preparing(2)
        run = Run(environment, [group(0, 6)], concurrency=1)
        await quiet()
        stop(run)
        await quiet()
        assert environment.freed == ["0-1-0", "0-2-0"]
        if run.task.done():
            await run.runner.close()
        else:
            await run.end()
        assert environment.held == []


async def test_what_fails_ahead_is_no_failure_of_the_trajectory(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Preparing):
        async def prepare(self, episodes: list[Episode]) -> None:
            raise RuntimeError("no machine")

    environment = Fails()
    run = Run(environment, [group(0, 3)], concurrency=1)
    await quiet()
    await run.end()
    assert [type(result) for result in run.results] == [TrajectoryRecord] * 3
    assert "episode 0-1-0 could not be prepared" in caplog.text


async def test_an_error_of_the_source_comes_when_its_group_is_needed() -> None:
    def broken() -> Any:
        yield group(0, 2)
        raise ValueError("row 2 is wrong")

    environment = Preparing(4)
    run = Run(environment, broken(), concurrency=1)
    await quiet()
    assert environment.held == ["0-1-0"]
    run.held.at_once = True
    run.held.answer(0)
    with pytest.raises(ValueError, match="row 2 is wrong"):
        await run.task
    assert len(run.results) == 2
    await run.runner.close()


async def test_an_environment_of_plain_functions_prepares_nothing() -> None:
    class Plain(CountingEnvironment):
        def prepare(self, episodes: list[Episode]) -> None:
            pytest.fail("nobody would know which thread plays it")

        def discard(self, names: list[str]) -> None:
            pytest.fail("nothing was prepared")

    async with runners({"env": Plain()}) as made:
        results: list[Any] = []

        async def sink(result: Any) -> None:
            results.append(result)

        rollout = rollout_of(made, policy=ScriptedPolicy(), concurrency=1)
        await run_groups(rollout, [group(0, 3)], sink)
    assert len(results) == 3


class Scheduling(RuleBasedStateMachine):
    """Groups of any size, answers in any order, a consumer of any pace, and an end at any time."""

    @initialize(
        shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2), st.booleans()), min_size=1, max_size=8),
        concurrency=st.integers(1, 4),
        ahead=st.integers(0, 4),
        atomic=st.booleans(),
        lockstep=st.booleans(),
    )
    def begin(
        self, shapes: list[tuple[int, int, bool]], concurrency: int, ahead: int, atomic: bool, lockstep: bool
    ) -> None:
        self.ahead, self.concurrency = ahead, concurrency
        self.environment = Preparing(ahead)
        self.loop = asyncio.Runner()
        made = (
            group(index, size, keep=max(1, size - spare), broken=broken)
            for index, (size, spare, broken) in enumerate(shapes)
        )
        self.groups = [SampleGroup(samples=one.samples, keep=one.keep, order=order) for order, one in enumerate(made)]
        self.room = 0
        self.loop.run(self._open(atomic, lockstep))

    async def _open(self, atomic: bool, lockstep: bool) -> None:
        self.run = Run(
            self.environment,
            self.groups,
            policy=GroupPolicy(atomic=atomic),
            pace=Pace(max_lag=None, held=True),
            concurrency=self.concurrency,
            scheduling="Lockstep" if lockstep else "Concurrent",
        )
        await quiet()

    def _then(self, act: Any) -> None:
        async def acted() -> None:
            act()
            await quiet()

        self.loop.run(acted())

    @precondition(lambda self: hasattr(self, "run") and bool(self.run.held.waiting))
    @rule(number=st.integers(0, 10))
    def answer(self, number: int) -> None:
        self._then(lambda: self.run.held.answer(number))

    @precondition(lambda self: hasattr(self, "run"))
    @rule(more=st.integers(1, 3))
    def allow(self, more: int) -> None:
        self.room += more
        self._update()

    def _update(self, *, stopped: bool = False) -> None:
        pace = self.run.pace
        assert pace is not None
        self._then(lambda: pace.update(version=0, room=self.room, settled=IntervalSet(), stopped=stopped))

    @precondition(lambda self: hasattr(self, "run") and self.room > 3)
    @rule(how=st.sampled_from(["drain", "cancel", "stop"]))
    def end(self, how: str) -> None:
        if how == "stop":
            self._update(stopped=True)
        else:
            self._then(self.run.drain.set if how == "drain" else self.run.task.cancel)
            assert not self.environment.held

    @invariant()
    def never_too_many_and_never_too_early(self) -> None:
        if not hasattr(self, "run"):
            return
        environment = self.environment
        assert len(environment.held) <= self.ahead
        assert not set(environment.held) & set(environment.begun)
        orders = [int(name.split("-")[0]) for name in environment.held + environment.begun]
        assert all(order < self.room for order in orders)
        # As without any preparation.
        assert environment.begun == sorted(environment.begun)

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        self.room = 100
        self._update()
        self.loop.run(self._finish())
        self.loop.close()
        environment = self.environment
        assert environment.held == []
        assert not set(environment.used) & set(environment.freed)

    async def _finish(self) -> None:
        self.run.held.at_once = True
        while self.run.held.waiting:
            self.run.held.answer(0)
        async with asyncio.timeout(240):
            await asyncio.wait((self.run.task,))
        await self.run.runner.close()


Scheduling.TestCase.settings = hypothesis_settings(deadline=None, max_examples=40, stateful_step_count=25)
TestScheduling = Scheduling.TestCase
