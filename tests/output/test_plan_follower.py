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
