"""Streams: as they complete, bounded, endless, and nothing lost when the reader leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kuberoll_workers.data.prompts import Sample, SampleGroup
from kuberoll_workers.data.record import Partial, TurnRecord
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult
from kuberoll_workers.rollouts.admission import Drain, SampleAdmission
from kuberoll_workers.rollouts.groups import GroupPolicy, GroupRun, rewards_differ
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.scheduling import TrajectoriesMissing, _Run
from kuberoll_workers.rollouts.streaming import stream_groups, stream_trajectories
from tests.rollouts.fakes import CountingEnvironment, ScriptedPolicy, rollout_of, runners, sample, until

ENVIRONMENTS = {"env": CountingEnvironment()}


def endless(turns: int = 1) -> Iterator[Sample]:
    index = 0
    while True:
        yield sample(index, metadata={"turns": turns})
        index += 1


def group(index: int, size: int = 2) -> SampleGroup:
    return SampleGroup(samples=tuple(sample(index, number) for number in range(size)), keep=size)


async def test_an_endless_source_is_read_no_further_than_needed() -> None:
    taken: list[int] = []

    def counted() -> Iterator[Sample]:
        for item in endless():
            taken.append(item.prompt.task_index)
            yield item

    async with runners(ENVIRONMENTS) as made:
        rollout = rollout_of(made, concurrency=3)
        async with stream_trajectories(rollout, counted(), buffer=2) as stream:
            seen = [(await anext(stream)).task_index for _ in range(50)]
        assert sorted(seen)[:40] == list(range(40))
        # What was read, what waited to be read, what was in flight.
        assert len(taken) <= 50 + 2 + 3 + 1


async def test_a_slow_reader_slows_the_rollout() -> None:
    policy = ScriptedPolicy()
    async with runners(ENVIRONMENTS) as made:
        rollout = rollout_of(made, policy=policy, concurrency=4)
        async with stream_trajectories(rollout, endless(), buffer=1) as stream:
            await anext(stream)
            # One was read; the others wait to be read.
            await until(lambda: len(policy.requests) == 1 + 1 + 4)
            for _ in range(1000):
                await asyncio.sleep(0)
            assert len(policy.requests) == 1 + 1 + 4
            # Complete, too: an environment steps in a thread of its own.
            await until(lambda: stream.tail.kept.trajectories == 1 + 1 + 4)
        assert (len(stream.unread), stream.partials) == (5, [])


async def test_a_finished_trajectory_frees_its_place_at_once() -> None:
    """One trajectory hangs; in the other place all others go by."""
    hung = asyncio.Event()

    class Policy(ScriptedPolicy):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            if request.session_id == "0-0-0":
                await hung.wait()
            return await super().generate(request)

    async with runners(ENVIRONMENTS) as made:
        rollout = rollout_of(made, policy=Policy(), concurrency=2)
        samples = [sample(index) for index in range(20)]
        async with stream_trajectories(rollout, samples) as stream:
            order = [(await anext(stream)).task_index for _ in range(19)]
            assert order == list(range(1, 20))
            hung.set()
            assert [record.task_index async for record in stream] == [0]


async def test_leaving_aborts_and_hands_back_the_complete_turns() -> None:
    blocked: set[str] = set()
    cancelled: set[str] = set()

    class Policy(ScriptedPolicy):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            if request.session_id[0] in "12" and request.request_id.split("-")[3] == "3":
                blocked.add(request.session_id)
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.add(request.session_id)
                    raise
            return await super().generate(request)

    async with runners(ENVIRONMENTS) as made:
        rollout = rollout_of(made, policy=Policy(), concurrency=3)
        samples = [sample(index, metadata={"turns": 1 if index == 0 else 5}) for index in range(3)]
        async with stream_trajectories(rollout, samples) as stream:
            assert (await anext(stream)).task_index == 0
            await until(lambda: len(blocked) == 2)
        assert cancelled == {"1-0-0", "2-0-0"}
        assert {(tuple(p.key), len(p.turns)) for p in stream.partials} == {((1, 0), 2), ((2, 0), 2)}
        assert [item async for item in stream] == []

        # They go on after their second turn, and end as if nothing had happened.
        policy = ScriptedPolicy()
        rest = [
            sample(p.key.task_index, metadata={"turns": 5}, partial=p)
            for p in sorted(stream.partials, key=lambda p: p.key)
        ]
        async with stream_trajectories(rollout_of(made, policy=policy, concurrency=1), rest) as second:
            ended: list[Any] = [record async for record in second]
    assert [request.request_id.split("-")[3] for request in policy.requests] == ["3", "4", "5"] * 2
    assert [(record.turn_count, record.stop_reason, record.total_reward) for record in ended] == [
        (5, "terminated", 5.0)
    ] * 2


async def test_who_leaves_a_stream_in_lockstep_is_handed_back_complete_turns() -> None:
    """Those that wait at the barrier, and the one they wait for."""
    blocked = asyncio.Event()

    class Policy(ScriptedPolicy):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            if request.session_id[0] == "1" and request.request_id.split("-")[3] == "3":
                blocked.set()
                await asyncio.Event().wait()
            return await super().generate(request)

    async with runners(ENVIRONMENTS) as made:
        policy = Policy()
        rollout = rollout_of(made, policy=policy, concurrency=2, scheduling="Lockstep")
        samples = [sample(index, metadata={"turns": 5}) for index in range(2)]
        async with stream_trajectories(rollout, samples) as stream:
            await blocked.wait()
    assert sorted((tuple(p.key), len(p.turns)) for p in stream.partials) == [((0, 0), 2), ((1, 0), 2)]


async def test_turns_that_do_not_follow_one_another_are_refused() -> None:
    def turns(*numbers: int) -> Partial:
        return Partial([dataclasses.replace(turn, turn=number) for turn, number in zip(made, numbers, strict=False)])

    (whole,) = await _interrupted_after(2)
    made = whole.turns
    for partial, number in ((turns(2, 3), 2), (turns(1, 1), 1), (turns(0), 0)):
        async with runners(ENVIRONMENTS) as environments:
            with pytest.raises(ValueError, match=rf"trajectory \(0, 0\): turn {number} does not follow turn "):
                rollout_of(environments).admit(sample(partial=partial))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("reward", "turns"), [(1.0, 2), (1.5e38, 2), (3e38, 0), (-3e38, 0), (1e39, 0), (1e300, 0)])
async def test_turns_whose_rewards_float32_cannot_add_up_are_run_again(reward: float, turns: int) -> None:
    """Older versions stored them."""
    (whole,) = await _interrupted_after(2)
    whole.turns[:] = [dataclasses.replace(turn, reward=reward) for turn in whole.turns]
    async with runners(ENVIRONMENTS) as environments:
        flight = rollout_of(environments).admit(sample(partial=whole))
    assert (flight.trajectory.turn, flight.trajectory.stop_reason) == (turns, None)


@pytest.mark.parametrize("deferred", [None, False, True])
async def test_the_last_turn_is_stored_only_of_a_trajectory_whose_record_waits(deferred: bool | None) -> None:
    stored: list[int] = []

    async def sink(turn: TurnRecord) -> None:
        stored.append(turn.turn)

    async with runners(ENVIRONMENTS) as made:
        rollout = rollout_of(made, turn_sink=sink)
        flight = rollout.admit(sample(), **({} if deferred is None else {"deferred": deferred}))
        await rollout.play(flight)
    assert flight.trajectory.stop_reason == "terminated"
    assert stored == ([1, 2] if deferred else [1])


async def test_what_was_begun_and_came_to_no_end_is_an_error() -> None:
    """Nothing in the loop does so; a mistake that would is not to be taken for the end of the run."""

    class Losing(_Run):
        async def _end(self, group: GroupRun, flight: InFlight) -> None:
            if flight.trajectory.sample.prompt.task_index != 1:
                await super()._end(group, flight)

    async def sink(result: Any) -> None: ...

    async with runners(ENVIRONMENTS) as made:
        rollout = rollout_of(made)
        groups = [group(index, 1) for index in range(3)]
        run = Losing(rollout, SampleAdmission(rollout, groups, GroupPolicy(), Drain()), sink, None, None)
        await run.concurrent()
        with pytest.raises(TrajectoriesMissing, match=r"^1 of the 3 trajectories that were started have no result"):
            run.check_all_ended()


async def test_nothing_follows_the_last_turn() -> None:
    (whole,) = await _interrupted_after(2)
    whole.turns[0] = dataclasses.replace(whole.turns[0], stop_reason="terminated")
    async with runners(ENVIRONMENTS) as environments:
        with pytest.raises(ValueError, match="turn 2 does not follow turn 1"):
            rollout_of(environments).admit(sample(partial=whole))


async def _interrupted_after(turns: int) -> list[Partial]:
    """The complete turns of trajectory (0, 0), of which there are so many."""
    blocked = asyncio.Event()

    class Policy(ScriptedPolicy):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            if request.request_id.split("-")[3] == str(turns + 1):
                blocked.set()
                await asyncio.Event().wait()
            return await super().generate(request)

    async with runners(ENVIRONMENTS) as made:
        rollout = rollout_of(made, policy=Policy())
        async with stream_trajectories(rollout, [sample(metadata={"turns": 5})]) as stream:
            await blocked.wait()
    return stream.partials


async def test_groups_come_when_they_are_complete() -> None:
    async with runners(ENVIRONMENTS) as made:
        rollout = rollout_of(made, concurrency=4)
        async with stream_groups(rollout, [group(index) for index in range(6)]) as stream:
            groups = [item async for item in stream]
    assert sorted(item.group.samples[0].prompt.task_index for item in groups) == list(range(6))
    assert all(len(item.kept) == 2 for item in groups)
    assert stream.tail.kept.trajectories == 12


async def test_groups_that_were_not_read_are_handed_back_whole() -> None:
    async with runners(ENVIRONMENTS) as made:
        async with stream_groups(rollout_of(made, concurrency=2), map(group, itertools.count()), buffer=2) as stream:
            read = await anext(stream)
            await until(lambda: stream.tail.kept.trajectories == 2 * 3)
        whole = [item.group.samples[0].prompt.task_index for item in (read, *stream.unread)]
    assert (whole, stream.partials) == ([0, 1, 2], [])


async def test_members_of_an_open_group_are_handed_back_too() -> None:
    class Policy(ScriptedPolicy):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            if request.session_id == "1-1-0":
                await asyncio.Event().wait()
            return await super().generate(request)

    async with runners(ENVIRONMENTS) as made:
        policy = Policy()
        rollout = rollout_of(made, policy=policy, concurrency=4)
        async with stream_groups(rollout, [group(0), group(1)]) as stream:
            await anext(stream)
            await until(lambda: stream.tail.kept.trajectories == 3)
        (partial,) = stream.partials
        assert tuple(partial.key) == (1, 0)
        assert partial.turns[-1].stop_reason == "terminated"


async def test_a_filtered_group_is_told_and_replaced() -> None:
    def groups() -> Iterator[SampleGroup]:
        index = 0
        while True:
            yield group(index)
            index += 1

    async with runners(ENVIRONMENTS) as made:
        policy = GroupPolicy(keep=rewards_differ, drop_budget=3, wanted=2)
        async with stream_groups(rollout_of(made, concurrency=1), groups(), policy=policy) as stream:
            seen = [(len(item.kept), len(item.dropped)) async for item in stream]
    assert seen == [(0, 2)] * 3 + [(2, 0)] * 2


async def test_drained_streams_end() -> None:
    async with runners(ENVIRONMENTS) as made:
        async with stream_trajectories(rollout_of(made, concurrency=3), endless()) as stream:
            await anext(stream)
            stream.drain()
            rest = [record async for record in stream]
        assert 1 <= len(rest) <= 12
        assert stream.partials == []


async def test_asynchronous_sources() -> None:
    more = asyncio.Event()

    async def source() -> AsyncIterator[Sample]:
        for index in range(3):
            yield sample(index)
        await more.wait()
        yield sample(3)

    async with runners(ENVIRONMENTS) as made:
        rollout = rollout_of(made, concurrency=8)
        async with stream_trajectories(rollout, source()) as stream:
            first = {(await anext(stream)).task_index for _ in range(3)}
            more.set()
            assert [record.task_index async for record in stream] == [3]
        assert first == {0, 1, 2}


async def test_an_asynchronous_source_with_nothing_to_give_does_not_hold_up_the_drain() -> None:
    async def silent() -> AsyncIterator[Sample]:
        yield sample(0)
        await asyncio.Event().wait()

    async with runners(ENVIRONMENTS) as made, stream_trajectories(rollout_of(made), silent()) as stream:
        await anext(stream)
        stream.drain()
        assert [record async for record in stream] == []


async def test_what_the_source_raises_reaches_the_reader() -> None:
    def broken() -> Iterator[Sample]:
        yield sample(0)
        raise ValueError("line 2: not a row")

    async with runners(ENVIRONMENTS) as made:
        rollout = rollout_of(made, concurrency=1)
        async with stream_trajectories(rollout, broken()) as stream:
            assert (await anext(stream)).task_index == 0
            with pytest.raises(ValueError, match="line 2: not a row"):
                await anext(stream)
            assert [record async for record in stream] == []


async def test_an_unknown_task_reaches_the_reader() -> None:
    async with (
        runners(ENVIRONMENTS) as made,
        stream_trajectories(rollout_of(made), [sample(task_name="chess")]) as stream,
    ):
        with pytest.raises(KeyError, match="no environment is named 'chess'"):
            await anext(stream)


async def test_a_stream_that_is_never_read() -> None:
    async with runners(ENVIRONMENTS) as made, stream_trajectories(rollout_of(made), endless()):
        pass


async def test_samples_of_an_asynchronous_source_fill_every_place() -> None:
    """All places wait for the source at once; none of them is given up because another was served first."""

    async def source() -> AsyncIterator[SampleGroup]:
        for index in range(2):
            await asyncio.sleep(0)
            yield group(index, 3)

    class Policy(ScriptedPolicy):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            started.add(request.session_id)
            if len(started) == 6:
                all_started.set()
            await all_started.wait()
            return await super().generate(request)

    started: set[str] = set()
    all_started = asyncio.Event()
    async with (
        runners(ENVIRONMENTS) as made,
        stream_groups(rollout_of(made, policy=Policy(), concurrency=6), source()) as stream,
    ):
        assert [len(item.kept) async for item in stream] == [3, 3]
