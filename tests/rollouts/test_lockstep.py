"""Lockstep: nobody is ahead, and nobody waits for one who has ended."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, PolicyUnavailable
from kuberoll_workers.rollouts.scheduling import _Phases
from kuberoll_workers.rollouts.settings import RetryPolicy
from tests.rollouts.fakes import ScriptedPolicy, roll, sample


def _turn(request: GenerationRequest) -> int:
    return int(request.request_id.split("-")[3])


@pytest.mark.slow
@given(lengths=st.lists(st.integers(min_value=1, max_value=6), min_size=1, max_size=12), size=st.integers(1, 5))
def test_batches_go_turn_by_turn(lengths: list[int], size: int) -> None:
    policy = ScriptedPolicy()
    samples = [sample(index, metadata={"turns": turns}) for index, turns in enumerate(lengths)]
    asyncio.run(roll(samples, policy=policy, concurrency=size, scheduling="Lockstep"))
    seen = [(int(request.session_id.split("-")[0]) // size, _turn(request)) for request in policy.requests]
    assert seen == sorted(seen)
    assert len(seen) == sum(lengths)


@pytest.mark.slow
async def test_a_deadline_at_the_barrier_does_not_open_it() -> None:
    """One trajectory is given up while it waits for a slow one; the third still waits for the slow one."""
    slow_may_go = asyncio.Event()
    policy = ScriptedPolicy()
    order: list[str] = []

    class Slow:
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            order.append(f"{request.session_id[0]} turn {_turn(request)}")
            if request.session_id.startswith("0-") and _turn(request) == 1:
                try:
                    await slow_may_go.wait()
                except asyncio.CancelledError:
                    order.append("0 is given up")
                    raise
            return await policy.generate(request)

    running = asyncio.create_task(
        roll(
            [sample(index, metadata={"turns": 2}) for index in range(3)],
            policy=Slow(),
            concurrency=3,
            scheduling="Lockstep",
            trajectory_seconds=2,
        )
    )
    results = await running
    # All wait for the slow one: none goes on before it is given up. The last one may still, before its own deadline.
    assert [result.stop_reason for result in results[:2]] == ["failed", "failed"]
    assert order[:4] == ["0 turn 1", "1 turn 1", "2 turn 1", "0 is given up"]


async def test_one_that_fails_is_not_waited_for() -> None:
    policy = ScriptedPolicy(lambda request: PolicyUnavailable("x") if request.session_id[0] == "1" else "y")
    results = await roll(
        [sample(index) for index in range(3)],
        policy=policy,
        concurrency=3,
        scheduling="Lockstep",
        retries=RetryPolicy(generation_attempts=1),
    )
    assert [result.stop_reason for result in results] == ["terminated", "failed", "terminated"]


async def _turns_of_the_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_leaves_while_waiting_is_not_counted_as_come() -> None:
    phases = _Phases(4)
    first, second = (asyncio.create_task(phases.arrive()) for _ in range(2))
    await _turns_of_the_loop()
    first.cancel()
    await asyncio.wait((first,))
    phases.leave()
    third = asyncio.create_task(phases.arrive())
    await _turns_of_the_loop()
    # Three are left, and two of them have come.
    assert not second.done()
    assert not third.done()
    async with asyncio.timeout(240):
        await phases.arrive()
        await asyncio.gather(second, third)


async def test_who_is_stopped_as_the_barrier_opens_has_come() -> None:
    phases = _Phases(2)
    first = asyncio.create_task(phases.arrive())
    await _turns_of_the_loop()
    await phases.arrive()
    # The barrier is open, but the first has not gone on yet.
    first.cancel()
    await asyncio.wait((first,))
    assert first.cancelled()
    phases.leave()
    async with asyncio.timeout(240):
        await phases.arrive()
