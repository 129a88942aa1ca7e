"""A run takes responses of the model that it began with alone, also where a branch of the hub has moved meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.policy.client import OtherModel, ServeClient, check_commit
from kuberoll_workers.policy.routing.router import RoutedPolicy
from tests.policy.test_routing_faults import PATIENCE, Replica, answer, static
from tests.rollouts.fakes import until

OLD, NEW = "a" * 40, "b" * 40


@asynccontextmanager
async def routed(*commits: str | None, wanted: str | None = OLD) -> AsyncIterator[tuple[RoutedPolicy, list[Replica]]]:
    made = [Replica(number) for number in range(len(commits))]
    for replica, commit in zip(made, commits, strict=True):
        replica.commit = commit
        await replica.start()
    try:
        async with (
            asyncio.timeout(PATIENCE),
            RoutedPolicy(static(made), lambda url: ServeClient(url, limit=100, commit=wanted)) as policy,
        ):
            yield policy, made
    finally:
        for replica in made:
            await replica.stop()


@given(found=st.sampled_from([None, OLD, NEW]), wanted=st.sampled_from([None, OLD, NEW]))
def test_only_commits_that_are_known_and_differ_are_refused(found: str | None, wanted: str | None) -> None:
    if found is not None and wanted is not None and found != wanted:
        with pytest.raises(OtherModel, match=f"spec.generation.model.revision: {wanted}"):
            check_commit("http://x", found, wanted)
    else:
        check_commit("http://x", found, wanted)


async def test_replicas_of_another_commit_get_nothing() -> None:
    async with routed(OLD, NEW, None) as (policy, made):
        numbers = [await answer(policy, f"s{number}") for number in range(20)]
        # One that says none is of a version that did not, or its model is no hub's.
        assert set(numbers) == {0, 2}
        assert not made[1].requests
    async with routed(OLD, NEW, wanted=None) as (policy, made):
        assert {await answer(policy, f"s{number}") for number in range(20)} == {0, 1}


async def test_an_answer_of_a_replica_that_changed_is_not_taken() -> None:
    async with routed(OLD, OLD) as (policy, made):
        first = await answer(policy, "s")
        # Restarted at the same address, after a push.
        made[first].commit = NEW
        numbers = [await answer(policy, "s", turn) for turn in range(1, 6)]
        assert set(numbers) == {1 - first}
        # Restarted once more, with the run's commit.
        made[first].commit = OLD
        made[1 - first].commit = NEW
        assert await answer(policy, "s", 6) == first


async def test_a_run_without_its_model_says_so() -> None:
    async with routed(NEW) as (policy, made):
        waiting = asyncio.create_task(answer(policy, "s"))
        await until(lambda: policy.outage() is not None)
        outage = policy.outage()
        assert outage is not None
        assert f"spec.generation.model.revision: {OLD}" in outage.reason
        assert not made[0].requests
        made[0].commit = OLD
        assert await waiting == 0
