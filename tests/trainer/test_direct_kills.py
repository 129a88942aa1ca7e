"""Worker pods that are killed while a trainer takes their groups on the direct path, and a trainer that dies, too."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kuberoll.trainer import Rollouts, Workers
from kuberoll.trainer.workers import WorkerAddress
from kuberoll_workers.data.record import encode_line
from kuberoll_workers.output.storage import open_storage
from tests.local.support import Endpoint
from tests.output.s3 import S3Server, s3, s3_server
from tests.pods.support import Pod
from tests.pods.test_worker_pod import SHARDS, Place, job

__all__ = ["s3", "s3_server"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOKEN = "read" * 8
GROUPS, REPEATS, KILLS = 60, 3, 8


class Pods:
    """The job's worker pods, each of which may be killed and replaced, as their Service knows them."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._stacks: dict[int, AsyncExitStack] = {}
        self.pods: dict[int, Pod] = {}

    def find(self) -> list[WorkerAddress]:
        names = [pod.ip for pod in self.pods.values()]
        return Workers(*names, token=TOKEN).find() if names else []

    async def start(self, shard: int) -> None:
        stack = self._stacks[shard] = AsyncExitStack()
        variables = {"KUBEROLL_TOKEN_READ_ACCESS_TRAINER": TOKEN}
        self.pods[shard] = await stack.enter_async_context(self.place.pod(shard, **variables))

    async def kill(self, shard: int) -> None:
        """SIGKILL."""
        self.pods[shard].process.kill()
        await self.close(shard)

    async def close(self, shard: int) -> None:
        await self._stacks.pop(shard).aclose()


@pytest.fixture
async def slow_endpoint() -> AsyncIterator[Endpoint]:
    """Workers that are slower than their trainer, which therefore waits for them."""
    async with Endpoint(0.05).serving() as served:
        yield served


async def test_each_group_once_and_as_the_journal_has_it(
    tmp_path: Path, slow_endpoint: Endpoint, s3: tuple[S3Server, str]
) -> None:
    server, bucket = s3
    server.upload_seconds = 0.05
    chance = random.Random(7)
    place = Place(tmp_path, slow_endpoint.url, f"{bucket}/run")
    place.job = job(
        dataset={"source": {"generator": {"count": GROUPS}}, "repeats": REPEATS},
        rollout={"concurrency": 2},
        # Parts are written when the trainer waits for them, or at the end.
        output={"parts": {"maxSeconds": 3600}},
    )
    pods = Pods(place)
    for shard in range(SHARDS):
        await pods.start(shard)
    delivered: list[tuple[tuple[int, ...], bytes]] = []
    state: dict[str, Any] | None = None
    saved, killed, direct = 0, 0, 0

    async def opened() -> Rollouts:
        rollouts = await asyncio.to_thread(
            lambda: Rollouts.open(place.output, consumer="grpo", allow_simulated=True, timeout=200, direct=pods)
        )
        if state is not None:
            rollouts.load_state_dict(json.loads(json.dumps(state)))
        return rollouts

    try:
        rollouts = await opened()
        batches = rollouts.batches_async(2, timeout=200)
        while (batch := await anext(batches, None)) is not None:
            trajectories = (record for group in batch.groups for record in group.trajectories)
            delivered += [(tuple(record.key), encode_line(record)) for record in trajectories]
            if chance.random() < 0.5:
                state, saved = rollouts.state_dict(), len(delivered)
            alive = [shard for shard, pod in pods.pods.items() if pod.process.returncode is None]
            if killed < KILLS and alive and chance.random() < 0.5:
                shard = chance.choice(alive)
                await pods.kill(shard)
                await pods.start(shard)
                killed += 1
            if chance.random() < 0.1:
                # The trainer dies, and what it had since its checkpoint is lost with it.
                direct += rollouts.counts.direct_parts
                del delivered[saved:]
                rollouts = await opened()
                batches = rollouts.batches_async(2, timeout=200)
        assert [await pod.end() for pod in pods.pods.values()] == [0] * SHARDS
    finally:
        for shard in list(pods.pods):
            await pods.close(shard)
    assert killed == KILLS
    # How many depends on the machine: what was written while nobody was connected comes by listings.
    assert direct + rollouts.counts.direct_parts > 0
    keys = [key for key, _ in delivered]
    assert len(keys) == len(set(keys)) == GROUPS * REPEATS
    storage = open_storage(place.output)
    lines = [line for shard in storage.shards() for _, line in storage.lines(shard)]
    assert sorted(line for _, line in delivered) == sorted(lines)
