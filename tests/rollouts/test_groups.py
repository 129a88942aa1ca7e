"""Prompt groups: oversampling, atomic groups, the filter and its replacements, in both schedulings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.prompts import SampleGroup
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TokenCounts, TrajectoryRecord
from kuberoll_workers.data.stop_reasons import DropReason, StopReason
from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, PolicyRefused
from kuberoll_workers.rollouts.drop_report import DropReport
from kuberoll_workers.rollouts.groups import GroupPolicy, GroupResult, Result, rewards_differ
from kuberoll_workers.rollouts.scheduling import run_groups
from tests.rollouts.fakes import CountingEnvironment, ScriptedPolicy, rollout_of, runners, sample

SCHEDULINGS = ["Concurrent", "Lockstep"]


class Rewarding(CountingEnvironment):
    """Pays what the metadata says, at the end."""

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        returned = super().step(logs, metadata)
        pays = [
            state.get("pay", 0.0) if end else 0.0 for state, end in zip(metadata, returned.terminateds, strict=True)
        ]
        return returned._replace(rewards=pays)


def group(
    index: int, size: int, *, keep: int | None = None, pays: list[float] | None = None, turns: int = 1
) -> SampleGroup:
    """Samples of one prompt; each with an episode of its own."""
    return SampleGroup(
        samples=tuple(
            sample(index, number, metadata={"turns": turns, "pay": pays[number] if pays else float(number)})
            for number in range(size)
        ),
        keep=size if keep is None else keep,
    )


async def run(
    groups: Any, policy: GroupPolicy | None = None, *, generator: Any = None, **changes: Any
) -> tuple[list[Result], list[GroupResult]]:
    results: list[Result] = []
    closed: list[GroupResult] = []

    async def sink(result: Result) -> None:
        results.append(result)

    async def group_sink(result: GroupResult) -> None:
        closed.append(result)

    async with runners({"env": Rewarding()}) as made:
        rollout = rollout_of(made, policy=generator, **changes)
        await run_groups(rollout, groups, sink, policy=policy, group_sink=group_sink)
    return results, closed


class Gated:
    """Answers a session's requests only when its gate is open; knows which were cancelled."""

    def __init__(self, opened: set[str]) -> None:
        self._inner = ScriptedPolicy()
        self._opened = opened
        self.cancelled: set[str] = set()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if request.session_id not in self._opened:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.add(request.session_id)
                raise
        return await self._inner.generate(request)


async def test_the_first_finishers_are_kept_and_the_rest_is_aborted() -> None:
    policy = Gated({"0-1-0", "0-3-0"})
    results, closed = await run([group(0, 4, keep=2)], generator=policy)
    assert policy.cancelled == {"0-0-0", "0-2-0"}
    assert {r.rollout_index for r in results if isinstance(r, TrajectoryRecord)} == {1, 3}
    dropped = [r for r in results if isinstance(r, DroppedRecord)]
    assert {(r.rollout_index, r.reason, r.stop_reason, r.turn_count) for r in dropped} == {
        (0, "oversampled", None, 0),
        (2, "oversampled", None, 0),
    }
    (outcome,) = closed
    assert (len(outcome.kept), len(outcome.dropped), len(outcome.failed)) == (2, 2, 0)


async def test_in_lockstep_the_first_finishers_are_those_of_fewest_turns() -> None:
    turns = [3, 1, 2, 5]
    samples = tuple(sample(0, number, metadata={"turns": count}) for number, count in enumerate(turns))
    results, _ = await run([SampleGroup(samples=samples, keep=2)], scheduling="Lockstep")
    assert {r.rollout_index for r in results if isinstance(r, TrajectoryRecord)} == {1, 2}
    dropped = {r.rollout_index: r for r in results if isinstance(r, DroppedRecord)}
    assert {(index, record.turn_count) for index, record in dropped.items()} == {(0, 2), (3, 2)}
    assert all(len(record.messages) == 1 + 2 * record.turn_count for record in dropped.values())
    # One token a response, three an observation.
    assert {(r.tokens.prompt, r.tokens.generated, r.tokens.environment) for r in dropped.values()} == {(6, 2, 6)}
    assert {(r.total_reward, tuple(r.rewards), r.seed, r.attempt, r.idx) for r in dropped.values()} == {
        (0.0, (0.0, 0.0), 7, 0, "row-0")
    }
    assert [(dropped[index].metadata, dropped[index].stop_reason) for index in (0, 3)] == [
        ({"turns": 1}, None),
        ({"turns": 3}, None),
    ]


async def test_a_place_freed_by_the_first_finishers_is_taken_by_the_next_group() -> None:
    # Two places: the hung sample of each group holds one until the other finishes the group.
    policy = Gated({f"{index}-0-0" for index in range(5)})
    groups = [group(index, 2, keep=1) for index in range(5)]
    results, closed = await run(groups, generator=policy, concurrency=2)
    assert len(closed) == 5
    assert sum(isinstance(result, TrajectoryRecord) for result in results) == 5


async def test_samples_not_begun_are_not_begun_when_the_group_is_complete() -> None:
    policy = ScriptedPolicy()
    results, _ = await run([group(0, 6, keep=2)], generator=policy, concurrency=1)
    assert [request.session_id for request in policy.requests] == ["0-0-0", "0-1-0"]
    assert len(results) == 2


async def test_finishing_together_keeps_no_more_than_wanted() -> None:
    results, _ = await run([group(0, 8, keep=3)], concurrency=8)
    kept = [result for result in results if isinstance(result, TrajectoryRecord)]
    assert len(kept) == 3
    assert len(results) == 8


async def test_a_failure_takes_one_of_the_spare_samples() -> None:
    policy = ScriptedPolicy(lambda r: PolicyRefused("no") if r.session_id == "0-0-0" else "x")
    results, _ = await run([group(0, 3, keep=2)], generator=policy, concurrency=1)
    assert [type(result).__name__ for result in results] == ["FailureRecord", "TrajectoryRecord", "TrajectoryRecord"]


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
async def test_an_atomic_group_fails_as_a_whole_and_alone(scheduling: str) -> None:
    policy = ScriptedPolicy(lambda r: PolicyRefused("bad token") if r.session_id == "1-2-0" else "x")
    results, closed = await run(
        [group(index, 4) for index in range(3)],
        GroupPolicy(atomic=True),
        generator=policy,
        concurrency=3,
        scheduling=scheduling,
    )
    finished = {r.task_index for r in results if isinstance(r, TrajectoryRecord)}
    failures = {r.rollout_index: r for r in results if isinstance(r, FailureRecord)}
    assert finished == {0, 2}
    assert set(failures) == {0, 1, 2, 3}
    assert (failures[2].stage, failures[2].kind) == ("generation", "data")
    for index in (0, 1, 3):
        assert (failures[index].stage, failures[index].kind) == ("group", "data")
        assert failures[index].cause == "sample 2 of its group failed: bad token"
    assert sorted(len(outcome.kept) for outcome in closed) == [0, 4, 4]


async def test_a_hopeless_atomic_group_stops_at_once() -> None:
    policy = Gated({"0-1-0"})
    refused = ScriptedPolicy(lambda r: PolicyRefused("no"))

    class Mixed:
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            return await (refused if request.session_id == "0-1-0" else policy).generate(request)

    results, _ = await run([group(0, 3)], GroupPolicy(atomic=True), generator=Mixed(), concurrency=2)
    assert all(isinstance(result, FailureRecord) for result in results)
    assert len(results) == 3
    assert policy.cancelled == {"0-0-0"}


async def test_results_of_held_groups_come_together() -> None:
    order: list[int] = []
    policy = ScriptedPolicy()

    async def sink(result: Result) -> None:
        order.append(result.task_index)

    async with runners({"env": Rewarding()}) as made:
        rollout = rollout_of(made, policy=policy, concurrency=12)
        groups = [group(index, 4, turns=index + 1) for index in range(3)]
        await run_groups(rollout, groups, sink, policy=GroupPolicy(atomic=True))
    assert order == [0] * 4 + [1] * 4 + [2] * 4


EQUAL, MIXED = [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
async def test_groups_of_equal_rewards_are_dropped_and_replaced(scheduling: str) -> None:
    def endless() -> Iterator[SampleGroup]:
        index = 0
        while True:
            yield group(index, 3, pays=EQUAL if index % 2 else MIXED)
            index += 1

    policy = GroupPolicy(keep=rewards_differ, wanted=4)
    results, closed = await run(endless(), policy, concurrency=30, scheduling=scheduling)
    kept = {r.task_index for r in results if isinstance(r, TrajectoryRecord)}
    dropped = {(r.task_index, r.reason) for r in results if isinstance(r, DroppedRecord)}
    # Exactly the first four that differ, and not one group begun beyond them.
    assert kept == {0, 2, 4, 6}
    assert dropped == {(1, "filtered"), (3, "filtered"), (5, "filtered")}
    assert len(closed) == 7


async def test_the_budget_ends_the_dropping() -> None:
    groups = [group(index, 3, pays=EQUAL) for index in range(5)]
    results, _ = await run(groups, GroupPolicy(keep=rewards_differ, drop_budget=2), concurrency=1)
    assert sorted({r.task_index for r in results if isinstance(r, DroppedRecord)}) == [0, 1]
    assert sorted({r.task_index for r in results if isinstance(r, TrajectoryRecord)}) == [2, 3, 4]


async def test_wanted_groups_without_a_filter() -> None:
    policy = ScriptedPolicy()
    results, _ = await run([group(index, 2) for index in range(9)], GroupPolicy(wanted=3), generator=policy)
    assert {result.task_index for result in results} == {0, 1, 2}


async def test_a_lost_atomic_group_is_replaced_where_groups_are_counted() -> None:
    policy = ScriptedPolicy(lambda r: PolicyRefused("no") if r.session_id.startswith("1-") else "x")
    results, _ = await run(
        [group(index, 2) for index in range(9)], GroupPolicy(atomic=True, wanted=3), generator=policy, concurrency=8
    )
    assert {r.task_index for r in results if isinstance(r, TrajectoryRecord)} == {0, 2, 3}


async def test_the_tail_report_tells_kept_from_dropped() -> None:
    results, _ = await run(
        [SampleGroup(samples=(sample(0, 0, metadata={"turns": 1}), sample(0, 1, metadata={"turns": 6})), keep=1)],
        concurrency=2,
    )
    report = DropReport()
    for result in results:
        report.add(result)
    told: Any = report.as_json()
    assert told == {
        "kept": {"trajectories": 1, "mean_turns": 1, "mean_generated_tokens": 1, "mean_total_reward": 0.0},
        "dropped": {
            "oversampled": {
                "trajectories": 1,
                "mean_turns": told["dropped"]["oversampled"]["mean_turns"],
                "mean_generated_tokens": told["dropped"]["oversampled"]["mean_turns"],
                "mean_total_reward": 0.0,
            }
        },
        "unfinished": 1,
    }
    assert report.given_up == 0


def test_a_tail_report_has_the_means_of_each_lot() -> None:
    def lot(
        reason: DropReason, stop_reason: StopReason | None, turns: int, generated: int, reward: float
    ) -> DroppedRecord:
        return DroppedRecord(
            task_index=0, rollout_index=0, task_name="env", idx=None, reason=reason, stop_reason=stop_reason,
            turn_count=turns, total_reward=reward, rewards=[], tokens=TokenCounts(9, generated, 9), messages=[],
            metadata=None, seed=None, attempt=0,
        )  # fmt: skip

    report = DropReport()
    nothing = {"trajectories": 0, "mean_turns": None, "mean_generated_tokens": None, "mean_total_reward": None}
    assert report.as_json() == {"kept": nothing, "dropped": {}, "unfinished": 0}
    report.add(lot("oversampled", None, 1, 4, 1.0))
    report.add(lot("filtered", "terminated", 2, 10, 0.5))
    report.add(lot("filtered", "max_turns", 4, 20, 1.0))
    assert report.as_json() == {
        "kept": nothing,
        "dropped": {
            "filtered": {"trajectories": 2, "mean_turns": 3, "mean_generated_tokens": 15, "mean_total_reward": 0.75},
            "oversampled": {"trajectories": 1, "mean_turns": 1, "mean_generated_tokens": 4, "mean_total_reward": 1.0},
        },
        "unfinished": 1,
    }
    assert report.given_up == 2


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
@given(data=st.data())
def test_no_sample_is_lost_or_counted_twice(scheduling: str, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=6))
    keeps = [data.draw(st.integers(1, size)) for size in sizes]
    failing = data.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 4))))
    policy = GroupPolicy(
        atomic=data.draw(st.booleans()),
        keep=data.draw(st.sampled_from([None, rewards_differ])),
        drop_budget=data.draw(st.none() | st.integers(0, 3)),
    )
    groups = [
        SampleGroup(
            samples=tuple(
                sample(index, number, metadata={"turns": data.draw(st.integers(1, 3)), "pay": number % 2})
                for number in range(size)
            ),
            keep=keep,
        )
        for index, (size, keep) in enumerate(zip(sizes, keeps, strict=True))
    ]

    def answer(request: GenerationRequest) -> str | Exception:
        task, rollout, _ = map(int, request.session_id.split("-"))
        return PolicyRefused("no") if (task, rollout) in failing else "x"

    results, closed = asyncio.run(
        run(
            groups,
            policy,
            generator=ScriptedPolicy(answer),
            concurrency=data.draw(st.integers(1, 8)),
            scheduling=scheduling,
        )
    )
    keys = [result.key for result in results]
    assert len(keys) == len(set(keys))
    assert len(closed) == len(groups)
    everything: list[Result] = []
    for outcome in closed:
        everything += [*outcome.kept, *outcome.failed, *outcome.dropped]
    assert sorted(keys) == sorted(r.key for r in everything)
    for outcome in closed:
        index = outcome.group.samples[0].prompt.task_index
        able = sum((index, number) not in failing for number in range(sizes[index]))
        assert len(outcome.kept) <= keeps[index]
        filtered = any(record.reason == "filtered" for record in outcome.dropped)
        if policy.atomic and able < keeps[index]:
            assert not outcome.kept
            assert len(outcome.failed) == sizes[index]
        elif not filtered:
            assert len(outcome.kept) == min(able, keeps[index])
        else:
            assert not outcome.kept


def test_a_group_that_cannot_be_complete_is_refused() -> None:
    with pytest.raises(ValueError, match="a group of 2 samples cannot be complete with 3"):
        group(0, 2, keep=3)


async def test_a_group_s_end_is_told_once_and_after_all_its_results_were_taken() -> None:
    """The result that comes first is taken last; one of the others is a failure."""
    begun: list[Result] = []
    taken: list[Result] = []
    told: list[tuple[int, int]] = []
    others = asyncio.Event()

    async def sink(result: Result) -> None:
        begun.append(result)
        if len(begun) == 1:
            await others.wait()
        taken.append(result)
        if len(taken) == 3:
            others.set()

    async def group_sink(result: GroupResult) -> None:
        told.append((len(taken), len(result.kept) + len(result.dropped) + len(result.failed)))

    def answer(request: GenerationRequest) -> str | Exception:
        return PolicyRefused("no") if request.session_id == "0-1-0" else "x"

    async with runners({"env": Rewarding()}) as made:
        rollout = rollout_of(made, policy=ScriptedPolicy(answer), concurrency=8)
        await run_groups(rollout, [group(0, 4, keep=3)], sink, group_sink=group_sink)
    assert told == [(4, 4)]
    assert taken[-1] is begun[0]
