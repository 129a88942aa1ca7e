"""The bound on trajectories that were started and not read: never exceeded, and never in the way of the end."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kuberoll_workers.data.prompts import SampleGroup
from kuberoll_workers.environments.inline import CoroutineExecutor
from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, PolicyRefused
from kuberoll_workers.rollouts.groups import GroupPolicy, GroupResult
from kuberoll_workers.rollouts.streaming import RolloutStream, stream_groups, stream_trajectories
from tests.examples import examples
from tests.rollouts.fakes import CountingEnvironment, ScriptedPolicy, rollout_of, sample

# The loop is quiet after fewer iterations than this: nothing here waits for a thread or a clock.
_ITERATIONS = 30


class OnTheLoop(CountingEnvironment):
    """Steps in the event loop, not in a thread."""

    async def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:  # type: ignore[override]
        return super().step(logs, metadata)


@asynccontextmanager
async def on_the_loop() -> Any:
    """A runner whose environment is on the loop of its caller."""
    runner = EnvironmentRunner(CoroutineExecutor(OnTheLoop(), timeout=30.0), max_batch=64)
    try:
        yield {"env": runner}
    finally:
        await runner.close()


class Held(ScriptedPolicy):
    """Answers a request when the test says so; refuses those of broken samples."""

    def __init__(self, *, at_once: bool = False) -> None:
        super().__init__()
        self.at_once = at_once
        self.waiting: list[asyncio.Event] = []
        self.started: set[str] = set()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.started.add(request.session_id)
        if not self.at_once:
            self.waiting.append(gate := asyncio.Event())
            try:
                await gate.wait()
            finally:
                if gate in self.waiting:
                    self.waiting.remove(gate)
        if request.sampling.seed == 0:
            raise PolicyRefused("a broken sample")
        return await super().generate(request)

    def answer(self, number: int) -> None:
        self.waiting.pop(number % len(self.waiting)).set()


def group(index: int, size: int, *, keep: int | None = None, broken: bool = False) -> SampleGroup:
    samples = tuple(
        sample(index, number, metadata={"turns": 1}, seed=0 if broken and number == 0 else 7) for number in range(size)
    )
    return SampleGroup(samples=samples, keep=size if keep is None else keep)


async def quiet() -> None:
    for _ in range(_ITERATIONS):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("size", "buffer", "ahead"),
    # The last is a group larger than the bound: it is run alone.
    [(1, 1, 17), (4, 0, 16), (4, 1, 17), (16, 1, 17), (16, None, 32), (5, 3, 19), (40, 1, 40)],
)
async def test_a_sleeping_reader_is_behind_by_a_known_number_of_trajectories(
    size: int, buffer: int | None, ahead: int
) -> None:
    policy = Held(at_once=True)
    async with on_the_loop() as made:
        groups = (group(index, size) for index in itertools.count())
        async with stream_groups(rollout_of(made, policy=policy, concurrency=16), groups, buffer=buffer) as stream:
            for read in range(3):
                for _ in range(20):
                    await quiet()
                assert len(policy.started) - read * size == ahead
                assert stream.run_ahead.unread == ahead
                await anext(stream)
    assert all(partial.turns[-1].stop_reason == "terminated" for partial in stream.partials)
    assert 3 * size + len(stream.unread) * size + len(stream.partials) == len(policy.started)


async def test_a_drained_stream_that_waits_for_its_reader_ends() -> None:
    async with on_the_loop() as made:
        rollout = rollout_of(made, policy=Held(at_once=True), concurrency=2)
        groups = (group(index, 2) for index in itertools.count())
        async with stream_groups(rollout, groups, buffer=0) as stream:
            await quiet()
            stream.drain()
            assert [len(item.kept) async for item in stream] == [2]


async def test_lockstep_waits_for_room_for_a_whole_batch() -> None:
    policy = Held(at_once=True)
    async with on_the_loop() as made:
        rollout = rollout_of(made, policy=policy, concurrency=4, scheduling="Lockstep")
        samples = (sample(index, metadata={"turns": 1}) for index in itertools.count())
        async with stream_trajectories(rollout, samples, buffer=2) as stream:
            seen = []
            for _ in range(6):
                await quiet()
                seen.append(len(policy.started))
                await anext(stream)
    assert seen == [4, 4, 8, 8, 8, 8]


@dataclasses.dataclass(frozen=True)
class Plan:
    concurrency: int
    buffer: int
    scheduling: str
    atomic: bool
    groups: list[SampleGroup]

    @property
    def bound(self) -> int:
        largest = max(len(item.samples) for item in self.groups)
        # Those that an atomic group fails without starting them come on top.
        return max(self.concurrency + self.buffer, largest) + (largest - 1 if self.atomic else 0)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    shapes = draw(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3), st.booleans()), min_size=1, max_size=8))
    return Plan(
        concurrency=draw(st.integers(1, 6)),
        buffer=draw(st.integers(0, 6)),
        scheduling=draw(st.sampled_from(["Concurrent", "Lockstep"])),
        atomic=draw(st.booleans()),
        groups=[
            group(index, size, keep=max(1, size - spare), broken=broken)
            for index, (size, spare, broken) in enumerate(shapes)
        ],
    )


class Reader(RuleBasedStateMachine):
    """Groups of any size, answers in any order, and a reader of any speed."""

    @initialize(plan=plans())
    def begin(self, plan: Plan) -> None:
        self.plan = plan
        self.runner = asyncio.Runner()
        self.policy = Held()
        self.seen: list[GroupResult] = []
        self.runner.run(self._open())

    async def _open(self) -> None:
        self.entered = on_the_loop()
        rollout = rollout_of(
            await self.entered.__aenter__(),
            policy=self.policy,
            concurrency=self.plan.concurrency,
            scheduling=self.plan.scheduling,
        )
        self.opened = stream_groups(
            rollout, self.plan.groups, policy=GroupPolicy(atomic=self.plan.atomic), buffer=self.plan.buffer
        )
        self.stream: RolloutStream[GroupResult] = await self.opened.__aenter__()
        await quiet()

    @precondition(lambda self: hasattr(self, "policy") and self.policy.waiting)
    @rule(numbers=st.lists(st.integers(0, 10), min_size=1, max_size=6))
    def answer(self, numbers: list[int]) -> None:
        async def answered() -> None:
            for number in numbers:
                if self.policy.waiting:
                    self.policy.answer(number)
                    await quiet()

        self.runner.run(answered())

    @precondition(lambda self: hasattr(self, "stream"))
    @rule(count=st.integers(1, 4))
    def read(self, count: int) -> None:
        async def some() -> None:
            for _ in range(count):
                reading = asyncio.ensure_future(anext(self.stream, None))
                await quiet()
                if not reading.done():
                    reading.cancel()
                elif (item := reading.result()) is not None:
                    self.seen.append(item)

        self.runner.run(some())

    @invariant()
    def never_too_far_ahead(self) -> None:
        if not hasattr(self, "stream"):
            return
        read = sum(map(results, self.seen))
        assert len(self.policy.waiting) <= self.plan.concurrency
        assert self.stream.run_ahead.unread <= self.plan.bound
        assert len(self.policy.started) - read <= self.stream.run_ahead.unread

    def teardown(self) -> None:
        if not hasattr(self, "stream"):
            return
        self.runner.run(self._finish())
        self.runner.close()

    async def _finish(self) -> None:
        self.policy.at_once = True
        while self.policy.waiting:
            self.policy.answer(0)
        async with asyncio.timeout(240):
            self.seen.extend([item async for item in self.stream])
        await self.opened.__aexit__(None, None, None)
        await self.entered.__aexit__(None, None, None)
        assert Counter(item.group.samples[0].prompt.task_index for item in self.seen) == Counter(
            range(len(self.plan.groups))
        )
        assert self.stream.run_ahead.unread == 0
        assert (self.stream.unread, self.stream.partials) == ([], [])


def results(item: GroupResult) -> int:
    return len(item.kept) + len(item.failed) + len(item.dropped)


TestReader = Reader.TestCase
TestReader.settings = hypothesis_settings(deadline=None, max_examples=examples(60), stateful_step_count=examples(30))
