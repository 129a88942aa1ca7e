"""How soon a worker knows what its run's consumer allows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.output import plan_follower
from kuberoll_workers.output.consumer_plan import ConsumerPlan, write_plan
from kuberoll_workers.output.plan_follower import PlanFollower
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.rollouts.pace import Pace
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker.run import in_background


class Waited(Pace):
    """A pace that says when it has a plan."""

    def __init__(self) -> None:
        super().__init__(max_lag=None, held=True)
        self.updated = asyncio.Event()

    def update(self, **changes: Any) -> None:
        super().update(**changes)
        self.updated.set()


async def test_a_plan_that_somebody_knows_of_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody looks by himself.
    for name in ("_LOCAL_SECONDS", "_LOCAL_IDLE_SECONDS"):
        monkeypatch.setattr(plan_follower, name, 3600.0)
    storage, pace, written = DirectoryStorage(tmp_path), Waited(), asyncio.Event()
    follower = PlanFollower(
        storage,
        pace,
        shard=0,
        shards=1,
        held=True,
        metrics=RolloutMetrics("job").consumer,
        report=lambda _: None,
        written=written,
    )
    following = asyncio.create_task(follower.follow())
    for version in (1, 2):
        write_plan(storage, ConsumerPlan(consumer="c", version=version, room=[1], settled=[[]]))
        written.set()
        async with asyncio.timeout(60):
            await pace.updated.wait()
        pace.updated.clear()
        assert pace.version == version
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_worker_that_can_no_longer_follow_its_trainer_ends(tmp_path: Path) -> None:
    """Else it would wait for ever for what the trainer has allowed."""
    storage = DirectoryStorage(tmp_path)

    async def refuses(_version: int) -> None:
        raise OSError("no such weights")

    follower = PlanFollower(
        storage,
        Waited(),
        shard=0,
        shards=1,
        held=True,
        metrics=RolloutMetrics("job").consumer,
        report=lambda _: None,
        serve=refuses,
    )
    write_plan(storage, ConsumerPlan(consumer="c", version=1, room=[1], settled=[[]]))
    with pytest.raises(OSError, match="no such weights"):
        async with asyncio.timeout(60), in_background(follower.follow()):
            await asyncio.Event().wait()


async def test_what_fails_is_the_body_s_own_error() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(KeyError):
        async with in_background(forever()):
            raise KeyError
