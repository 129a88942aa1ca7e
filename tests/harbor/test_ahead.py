"""Machines that are started ahead of their episodes: each is used once or removed, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kuberoll_api.model.environments import Environment
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.registry import UnusableEnvironment, create
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.harbor.ahead import MachinesAhead, Starting
from kuberoll_workers.harbor.environment import SandboxAgents
from kuberoll_workers.harbor.rows import row_of
from kuberoll_workers.harbor.task import read_task
from kuberoll_workers.players.sessions import player_of
from kuberoll_workers.rollouts.scheduling import run_groups
from kuberoll_workers.sandboxes import drivers
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxError, SandboxLost, SandboxUnavailable
from kuberoll_workers.sandboxes.leases import Lease, Sandboxes
from kuberoll_workers.sandboxes.meters import FAILED, REMOVED, STARTED, UNUSED, USED
from kuberoll_workers.sandboxes.starts import Reservation, Starts
from kuberoll_workers.telemetry import definitions as metrics
from tests.harbor.artificial import ENTRYPOINT, TOML, ArtificialPolicy, groups_of
from tests.harbor.writing import write_task
from tests.rollouts.fakes import rollout_of
from tests.sandboxes.conftest import busybox, cache, sandboxes  # noqa: F401 - fixtures


class Sham:
    """A machine that is none.

    Attributes:
        started: Whether its start has ended.
        users: How often somebody has had it.
    """

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.start = asyncio.Event()
        self.failed = self.started = self.ended = False
        self.users = 0
        self.use = None

    async def check(self) -> None:
        if self.lost.is_set():
            raise SandboxLost("it is gone")


class Factory:
    """Starts shams, when the test lets them."""

    def __init__(self) -> None:
        self.made: list[Sham] = []

    @asynccontextmanager
    async def machine(self, reservation: Reservation) -> AsyncIterator[Any]:
        sham = Sham()
        self.made.append(sham)
        try:
            await sham.start.wait()
            sham.started = True
            if sham.failed:
                raise SandboxUnavailable("no room")
            yield sham
            await sham.check()
        finally:
            sham.ended = True

    @property
    def starting(self) -> list[Sham]:
        return [sham for sham in self.made if not (sham.started or sham.ended)]

    @property
    def ready(self) -> list[Sham]:
        return [sham for sham in self.made if sham.started and not sham.ended]


async def quiet() -> None:
    """Let the event loop do what can be done at once."""
    for _ in range(20):
        await asyncio.sleep(0)


class Ahead(RuleBasedStateMachine):
    """Episodes are prepared, begin, end and are given up, and machines start, fail and are lost, in any order."""

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.factory = Factory()
        self.sandboxes = Sandboxes(None)  # type: ignore[arg-type]
        self.runner.run(self._open())
        self.number = self.unprepared = 0
        self.prepared: list[str] = []
        # Episodes that have begun, with what ends them.
        self.running: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self.used: list[Sham] = []

    async def _open(self) -> None:
        self.ahead = MachinesAhead(self.sandboxes)

    def _run(self, *acts: Any) -> None:
        async def all_of() -> None:
            for act in acts:
                found = act()
                if asyncio.iscoroutine(found):
                    await found
            await quiet()

        self.runner.run(all_of())

    @rule()
    def prepare(self) -> None:
        self.number += 1
        name = str(self.number)
        self.prepared.append(name)
        self._run(lambda: self.ahead.prepare(name, self.factory.machine))

    @rule(data=st.data())
    def play(self, data: st.DataObject) -> None:
        """An episode begins, prepared or not."""
        name = data.draw(st.sampled_from([*self.prepared, "unprepared"]))
        if name == "unprepared":
            self.number += 1
            self.unprepared += 1
            name = f"unprepared-{self.number}"
        else:
            self.prepared.remove(name)
        over = asyncio.Event()

        async def played() -> None:
            try:
                async with self.ahead.machine(name, self.factory.machine) as lease:
                    sham: Any = lease
                    assert not sham.ended
                    sham.users += 1
                    self.used.append(sham)
                    await over.wait()
            except SandboxError:
                pass

        self._run(lambda: self.running.__setitem__(name, (asyncio.ensure_future(played()), over)))

    @precondition(lambda self: bool(getattr(self, "running", None)))
    @rule(data=st.data(), stopped=st.booleans())
    def end(self, data: st.DataObject, stopped: bool) -> None:
        task, over = self.running.pop(data.draw(st.sampled_from([*self.running])))
        if stopped:
            self._run(task.cancel)
        else:
            over.set()
            for sham in self.factory.starting:
                sham.start.set()
            self._run(lambda: asyncio.wait((task,)))
            assert task.done()
            assert task.exception() is None

    @precondition(lambda self: bool(getattr(self, "prepared", None)))
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.prepared))
        self.prepared.remove(name)
        self._run(lambda: self.ahead.discard(name))

    @precondition(lambda self: hasattr(self, "factory") and bool(self.factory.starting))
    @rule(data=st.data(), fails=st.booleans())
    def start(self, data: st.DataObject, fails: bool) -> None:
        sham = data.draw(st.sampled_from(self.factory.starting))
        sham.failed = fails
        self._run(sham.start.set)

    @precondition(lambda self: hasattr(self, "factory") and bool(self.factory.ready))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self._run(data.draw(st.sampled_from(self.factory.ready)).lost.set)

    @rule()
    def give_way(self) -> None:
        """Others find no room: the last one is gone, and none are prepared for a while."""
        left = sorted(self.ahead.names, key=int)
        self._run(self.sandboxes.give_way)
        assert self.ahead.names == set(left[:-1])
        self.ahead._short_until = 0.0

    @invariant()
    def one_for_each(self) -> None:
        if not hasattr(self, "factory"):
            return
        assert self.ahead.names <= set(self.prepared)
        assert all(sham.users <= 1 for sham in self.factory.made)
        alive = [sham for sham in self.factory.made if not sham.ended]
        assert len(alive) <= len(self.ahead.names) + len(self.running)
        assert self.sandboxes.meters.value(metrics.SANDBOXES_AHEAD) == len(self.ahead.names)

    def teardown(self) -> None:
        if not hasattr(self, "factory"):
            return

        async def closed() -> None:
            for task, _ in self.running.values():
                task.cancel()
            if self.running:
                await asyncio.wait([task for task, _ in self.running.values()])
            await self.ahead.close()

        self._run(closed)
        self.runner.close()
        assert all(sham.ended for sham in self.factory.made)
        assert not self.ahead.names
        meters = self.sandboxes.meters
        counts = [meters.value(metrics.SANDBOXES_PREPARED, result) for result in (USED, UNUSED, FAILED)]
        assert sum(counts) >= self.number - self.unprepared


Ahead.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)
TestAhead = Ahead.TestCase


async def test_whoever_is_needed_starts_first() -> None:
    starts, order = Starts(1), list[str]()
    waiting, needed, later = Reservation(), Reservation(), Reservation()
    needed.need()

    async def start(name: str, reservation: Reservation) -> None:
        async with starts.place(reservation):
            order.append(name)
            await asyncio.sleep(0)

    async with starts.place(needed):
        tasks = [
            asyncio.ensure_future(start(name, reservation))
            for name, reservation in (("waits", waiting), ("comes to be needed", later), ("needed", needed))
        ]
        await asyncio.sleep(0)
        later.need()
    await asyncio.gather(*tasks)
    assert order == ["comes to be needed", "needed", "waits"]
    # One that is cancelled with its turn passes it on.
    async with starts.place(needed):
        first, second = (asyncio.ensure_future(start(str(number), needed)) for number in range(2))
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait((first,))
    await second
    assert order[3:] == ["1"]


def starting(sandboxes: Sandboxes, busybox: str) -> Starting:  # noqa: F811
    def start(reservation: Reservation) -> Any:
        return sandboxes.lease(SandboxSpec(image=busybox, memory=256 << 20, processes=64), reservation)

    return start


@pytest.mark.processes
async def test_real_machines_are_used_once_or_removed(sandboxes: Sandboxes, busybox: str) -> None:  # noqa: F811
    ahead, start = MachinesAhead(sandboxes), starting(sandboxes, busybox)
    for name in ("one", "two", "three"):
        ahead.prepare(name, start)
    one = ahead._machines["one"]
    await one._settled.wait()
    assert sandboxes.in_use == 0
    lease: Lease
    async with ahead.machine("one", start) as lease:
        assert sandboxes.in_use == 1
        assert (await lease.sandbox.exec("echo here")).text == "here\n"
    assert lease.use is not None
    assert 0 <= lease.use.ahead_seconds <= lease.use.seconds
    # What is lost before it is needed costs its episode nothing.
    two = ahead._machines["two"]
    await two._settled.wait()
    assert two._ready is not None
    await sandboxes._driver.remove(two._ready.lease.sandbox.name)
    async with ahead.machine("two", start) as lease:
        assert (await lease.sandbox.exec("echo there")).text == "there\n"
    await ahead.discard("three")
    meters = sandboxes.meters
    assert [meters.value(metrics.SANDBOXES_PREPARED, result) for result in (USED, UNUSED, FAILED)] == [1, 1, 1]
    assert (sandboxes.in_use, meters.value(metrics.SANDBOXES_AHEAD)) == (0, 0)
    await ahead.close()


@pytest.mark.processes
async def test_whoever_waits_for_room_has_that_of_those_that_nobody_needs(
    sandboxes: Sandboxes,  # noqa: F811
    busybox: str,  # noqa: F811
) -> None:
    driver = sandboxes._driver
    create, remove, room = driver.create, driver.remove, asyncio.Semaphore(1)

    async def created(name: str, spec: SandboxSpec) -> Any:
        await room.acquire()
        return await create(name, spec)

    async def removed(name: str) -> None:
        await remove(name)
        room.release()

    driver.create, driver.remove = created, removed  # type: ignore[method-assign]
    sandboxes._patience = 0.01
    ahead, start = MachinesAhead(sandboxes), starting(sandboxes, busybox)
    ahead.prepare("later", start)
    await ahead._machines["later"]._settled.wait()
    async with ahead.machine("now", start) as lease:
        assert (await lease.sandbox.exec("true")).succeeded
        assert ahead.names == frozenset()
        ahead.prepare("again", start)
        assert ahead.names == frozenset()
    await ahead.close()
    driver.create, driver.remove = create, remove  # type: ignore[method-assign]


@pytest.mark.processes
@pytest.mark.slow
async def test_a_job_whose_sandboxes_start_ahead(
    busybox: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(drivers.VARIABLE, "namespaces")
    write_task(tmp_path / "task", changed={"task.toml": TOML.format(image=busybox)})
    row = row_of(read_task(tmp_path / "task"), str(tmp_path / "task"))
    spec = Environment.model_validate(
        {"name": "env", "agent": {"entrypoint": ENTRYPOINT}, "sandbox": {"startAhead": 2}}
    )
    made: list[SandboxAgents] = []

    def factory() -> Any:
        try:
            environment = create(spec)
        except UnusableEnvironment as error:
            pytest.skip(str(error))
        assert isinstance(environment, SandboxAgents)
        made.append(environment)
        return environment

    executor = make_executor(factory, isolation="Inline", processes=1, timeout=spec.call_seconds)
    runner = EnvironmentRunner(executor, max_batch=1)
    results: list[Any] = []

    async def sink(result: Any) -> None:
        results.append(result)

    policy = ArtificialPolicy()
    try:
        rollout = rollout_of({"env": runner}, policy=policy, concurrency=2, players={"env": player_of(spec)})
        await run_groups(rollout, groups_of(row, [[0.0] * 4] * 2), sink)
    finally:
        await runner.close()
    assert policy.opened == [f"{task}-{number}-0" for task in range(2) for number in range(4)]
    assert [type(result) for result in results] == [TrajectoryRecord] * 8
    uses = [use for result in results for use in result.metadata["result"]["sandboxes"]]
    assert len(uses) == 8
    [environment] = made
    meters = environment.meters
    # All but those that have a place at once.
    assert meters.value(metrics.SANDBOXES_PREPARED, USED) == 6
    assert meters.value(metrics.SANDBOX_STARTS, STARTED) == meters.value(metrics.SANDBOX_REMOVALS, REMOVED) == 8
    assert meters.value(metrics.SANDBOXES_AHEAD) == meters.value(metrics.SANDBOXES_IN_USE) == 0
    assert all(use["ahead_seconds"] <= use["seconds"] for use in uses)
    assert len(meters.take()[metrics.SANDBOX_WAIT_SECONDS.name, ()]) == 8
