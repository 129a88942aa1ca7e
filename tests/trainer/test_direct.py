"""The direct path: what a consumer has of workers is what the journals have, once, whatever comes when."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll.trainer import Batch, Rollouts, Workers
from kuberoll.trainer.jobs import JobWeights
from kuberoll.trainer.journals import JournalReader, open_place
from kuberoll.trainer.workers import WorkerAddress
from kuberoll_api.http_server import serving
from kuberoll_operator.render.workers import build_workers_service
from kuberoll_workers.data.record import encode_line
from kuberoll_workers.output.feed_server import feed_routes
from kuberoll_workers.output.part_feed import PartFeed
from kuberoll_workers.output.part_journal import PartLimits
from kuberoll_workers.output.run_directory import MANIFEST
from kuberoll_workers.output.storage import ObjectStorage, open_storage
from kuberoll_workers.output.store import ResultStore
from kuberoll_workers.telemetry import RolloutMetrics
from tests.operator.test_render import context
from tests.output.s3 import S3Server, s3, s3_server
from tests.output.support import Observed, failure
from tests.trainer.support import manifest, trajectory

__all__ = ["s3", "s3_server"]

TOKEN = "read" * 8
REPEATS = 3
LONG = PartLimits(max_seconds=3600.0)
"""Parts that nobody waits for are not written in these tests."""


@dataclass
class Source:
    """Workers that come and go."""

    addresses: list[WorkerAddress] = field(default_factory=list)

    def find(self) -> list[WorkerAddress]:
        return list(self.addresses)


@dataclass
class Worker:
    """A worker's store and its feed."""

    store: ResultStore
    feed: PartFeed
    address: WorkerAddress

    @property
    def owner(self) -> str:
        """What names of its parts begin with."""
        return str(self.store._journals["shard-00000"]._owner)  # type: ignore[attr-defined]

    async def finish(self, *tasks: int, **changes: Any) -> None:
        """Finish all trajectories of some groups."""
        for task in tasks:
            for rollout in range(REPEATS):
                await self.store.result(trajectory(task, rollout, **changes))


@asynccontextmanager
async def worker(location: str, *, shard: int = 0, shards: int = 1) -> AsyncIterator[Worker]:
    """A worker of one shard; it is ended without writing what waits, as one that is killed."""
    feed = PartFeed()
    store = ResultStore(
        open_storage(location, parts=LONG),
        shards=[shard],
        shard_count=shards,
        repeats={"env": REPEATS},
        turns=None,
        seconds=Observed(),
        stored=lambda _: None,
        feed=feed,
    )
    async with serving(feed_routes(feed, [TOKEN], RolloutMetrics("test").direct), host="127.0.0.1", port=0) as port:
        try:
            yield Worker(store, feed, WorkerAddress("127.0.0.1", port, TOKEN))
        finally:
            feed.end()
            for journal in store._journals.values():
                if (task := journal._writer) is not None:  # type: ignore[attr-defined]
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)


def begin_run(location: str, **made: Any) -> None:
    open_storage(location).write(MANIFEST, json.dumps(manifest(repeats=REPEATS, **made)).encode())


async def opened(location: str, source: Any, **options: Any) -> Rollouts:
    return await asyncio.to_thread(lambda: Rollouts.open(location, consumer="test", direct=source, **options))


async def taken(batches: AsyncIterator[Batch]) -> list[int]:
    """Tasks of the groups of the next batch."""
    async with asyncio.timeout(60):
        return [group.key.task_index for group in (await anext(batches)).groups]


async def test_a_group_comes_when_it_is_in_the_store_and_not_before(s3: tuple[S3Server, str]) -> None:
    server, bucket = s3
    location = f"{bucket}/run"
    begin_run(location, groups=3)
    async with worker(location) as first:
        rollouts = await opened(location, Source([first.address]))
        batches = rollouts.batches_async(1)
        next_batch = asyncio.create_task(taken(batches))
        await first.store.result(trajectory(0, 0))
        server.waiting.clear()
        server.held.clear()
        try:
            await first.store.result(trajectory(0, 1))
            await first.store.result(trajectory(0, 2))
            # It is written because the consumer waits, although parts are written by the hour.
            assert await asyncio.to_thread(server.waiting.wait, 60)
            assert not next_batch.done()
        finally:
            server.held.set()
        assert await next_batch == [0]
        assert rollouts.counts.direct_parts >= 1
        # What ended while nobody waited is written when somebody does.
        await first.finish(1)
        assert await taken(batches) == [1]
        # Some failed: the finished ones and the failure are in different journals.
        await first.store.result(trajectory(2, 0))
        await first.store.result(failure(2, 1))
        await first.store.result(trajectory(2, 2))
        assert await taken(batches) == [2]
    assert len(list(open_storage(location).lines("shard-00000"))) == 8
    assert rollouts.counts.short_groups == 1


async def test_what_a_worker_had_not_written_is_nobody_s_when_it_dies(s3: tuple[S3Server, str]) -> None:
    """Its successor runs it again, and what the trainer has is what the journal has."""
    server, bucket = s3
    location = f"{bucket}/run"
    begin_run(location, groups=4)
    source = Source()
    rollouts = await opened(location, source)
    batches = rollouts.batches_async(1)
    async with worker(location) as first:
        source.addresses = [first.address]
        next_batch = asyncio.create_task(taken(batches))
        await first.finish(0)
        assert await next_batch == [0]
        next_batch = asyncio.create_task(taken(batches))
        # Its next part never arrives.
        server.refused = (f"{first.owner}-00000002.jsonl",)
        server.waiting.clear()
        await first.finish(1, reward=1.0)
        assert await asyncio.to_thread(server.waiting.wait, 60)
    assert not next_batch.done()
    async with worker(location) as second:
        source.addresses = [second.address]
        assert len(second.store.state.stored) == REPEATS
        await second.finish(1, reward=2.0)
        assert await next_batch == [1]
        await second.finish(2, 3)
        assert await taken(batches) == [2]
        assert await taken(batches) == [3]
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
    rewards = {group.key.task_index: {r.total_reward for r in group.trajectories} for group in replayed(location)}
    assert rewards == {0: {1.0}, 1: {2.0}, 2: {1.0}, 3: {1.0}}


def replayed(location: str) -> list[Any]:
    batches = Rollouts.open(location, consumer="again").batches(1, wait=False)
    return [group for batch in batches for group in batch.groups]


async def test_a_state_that_was_saved_on_the_direct_path_goes_on_there(s3: tuple[S3Server, str]) -> None:
    location = f"{s3[1]}/run"
    begin_run(location, groups=6, shards=2)
    async with worker(location, shards=2) as even, worker(location, shard=1, shards=2) as odd:
        source = Source([even.address, odd.address])
        had: list[int] = []
        state: dict[str, Any] | None = None
        for task in range(6):
            rollouts = await opened(location, source)
            if state is not None:
                rollouts.load_state_dict(state)
            next_batch = asyncio.create_task(taken(rollouts.batches_async(1)))
            await (odd if task % 2 else even).finish(task)
            had += await next_batch
            state = json.loads(json.dumps(rollouts.state_dict()))
    assert had == list(range(6))


async def test_a_worker_that_does_not_know_the_token_or_is_none_costs_nothing_but_time(
    s3: tuple[S3Server, str], caplog: pytest.LogCaptureFixture
) -> None:
    location = f"{s3[1]}/run"
    begin_run(location, groups=1)
    async with worker(location) as first, serving([], host="127.0.0.1", port=0) as other:
        port = first.address.port
        source = Source(
            [
                WorkerAddress("127.0.0.1", port, "wrong" * 8),
                WorkerAddress("127.0.0.1", other, TOKEN),
                WorkerAddress("127.0.0.1", 1, TOKEN),
            ]
        )
        rollouts = await opened(location, source, poll_seconds=0.05)
        next_batch = asyncio.create_task(taken(rollouts.batches_async(1)))
        await first.finish(0)
        await first.store.close()
        assert await next_batch == [0]
    assert rollouts.counts.direct_parts == 0
    assert "give a token that its workers know" in caplog.text
    assert "it does not serve one" in caplog.text


async def test_several_consumers_wait_at_once_and_one_that_stays_away_is_no_burden(s3: tuple[S3Server, str]) -> None:
    location = f"{s3[1]}/run"
    begin_run(location, groups=4)
    async with worker(location) as first:
        consumers = [await opened(location, Source([first.address])) for _ in range(3)]
        iterators = [consumer.batches_async(1) for consumer in consumers]
        for task in range(3):
            # The last one takes a first batch and no more.
            waiting = [asyncio.create_task(taken(each)) for each in iterators[: 3 if task == 0 else 2]]
            await first.finish(task)
            assert await asyncio.gather(*waiting) == [[task]] * len(waiting)
        await first.finish(3)
        assert await taken(iterators[2]) == [1]


async def test_workers_are_told_of_each_plan(s3: tuple[S3Server, str]) -> None:
    location = f"{s3[1]}/run"
    begin_run(location, groups=2, shards=2, **{"rollout.onPolicy.maxLag": 1, "rollout.onPolicy.onStale": "Drop"})
    async with worker(location, shards=2) as even, worker(location, shard=1, shards=2) as odd:
        rollouts = await opened(location, Source([even.address, odd.address]))
        batches = rollouts.batches_async(1)
        # Both have answered; one of them may hold a request still.
        for task, each in enumerate((even, odd)):
            next_batch = asyncio.create_task(taken(batches))
            await each.finish(task)
            assert await next_batch == [task]
        for note in (rollouts.published, rollouts.stop):
            await asyncio.to_thread(note)
            for each in (even, odd):
                async with asyncio.timeout(60):
                    await each.feed.plan_written.wait()
                each.feed.plan_written.clear()


async def test_a_source_that_fails_costs_nothing_but_time(
    s3: tuple[S3Server, str], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def find(self) -> list[WorkerAddress]:
            raise LookupError("no workers today")

    location = f"{s3[1]}/run"
    begin_run(location, groups=1)
    async with worker(location) as first:
        rollouts = await opened(location, Broken(), poll_seconds=0.05)
        next_batch = asyncio.create_task(taken(rollouts.batches_async(1)))
        await first.finish(0)
        await first.store.close()
        assert await next_batch == [0]
    assert "no workers today" in caplog.text


@pytest.mark.parametrize("name", ["", "http://workers", "workers:x", "workers:70000", "[::1]:0"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="expected the host:port of workers"):
        Workers(name, token=TOKEN)


def test_names_of_workers() -> None:
    found = Workers("127.0.0.7:9000", "127.0.0.8", "[::1]:9001", "no-such-name.invalid", token=TOKEN).find()
    assert [str(address) for address in found] == ["127.0.0.7:9000", "127.0.0.8:9464", "::1:9001"]
    assert TOKEN not in repr(found)
    with pytest.raises(ValueError, match="give the host:port of the workers"):
        Workers(token=TOKEN)


def test_a_job_s_workers_are_behind_its_service() -> None:
    service = build_workers_service(context())
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    port = service["spec"]["ports"][0]["port"]
    found = JobWeights(api=None, namespace=namespace, name=context().name).workers(TOKEN)
    assert found == Workers(f"{name}.{namespace}.svc:{port}", token=TOKEN)
    assert service["spec"]["clusterIP"] == "None"


@pytest.fixture(scope="module")
def memory() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


@given(seed=st.integers(0, 1 << 32))
def test_parts_that_come_directly_and_by_listings_are_read_once_in_any_order(memory: str, seed: int) -> None:
    """Also over restarts of the reader, whose places never pass over a line."""
    chance = random.Random(seed)
    location = f"{memory}/{uuid.uuid4().hex}"
    storage = open_storage(location)
    assert isinstance(storage, ObjectStorage)
    reader = JournalReader(open_place(location), is_settled=lambda _: False)
    owners = [f"shard-0000{shard}/worker-0000{shard}-ab" for shard in (0, 1)] + ["failures/worker-00000-ab"]
    written: dict[str, bytes] = {}
    seen: list[tuple[str, int]] = []
    numbers = dict.fromkeys(owners, 0)

    def note(line: Any) -> None:
        assert written[line.position.file][line.position.offset :].startswith(line.text)
        seen.append((line.position.file, line.position.offset))

    for _ in range(chance.randrange(5, 40)):
        match chance.randrange(6):
            case 0 | 1 | 2:
                owner = chance.choice(owners)
                numbers[owner] += 1
                name = f"{owner}-{numbers[owner]:08d}.jsonl"
                lines = [encode_line(trajectory(len(written), rollout)) for rollout in range(chance.randrange(1, 4))]
                written[name] = b"".join(lines)
                storage._fs.pipe_file(f"{storage._root}/{name}", written[name])
            case 3 | 4:
                # Workers repeat themselves, and some answers never come.
                for name in sorted(chance.sample(sorted(written), min(len(written), chance.randrange(5)))):
                    if reader.follows(name) and not reader.has_read(name):
                        for line in reader.lines_of(name, written[name]):
                            note(line)
            case 5:
                for line in reader.lines():
                    note(line)
        if chance.random() < 0.1:
            hints = json.loads(json.dumps(reader.hints(iter(()))))
            reader = JournalReader(open_place(location), is_settled=lambda _: False, hints=hints)
    for line in reader.lines():
        note(line)
    expected = [
        (name, offset)
        for name, data in written.items()
        for offset in (0, *(at + 1 for at in range(len(data) - 1) if data[at : at + 1] == b"\n"))
    ]
    # Failures are read again by a reader that begins anew, as they may be needed.
    assert sorted(set(seen)) == sorted(expected)
    shards = [place for place in seen if place[0].startswith("shard-")]
    assert len(shards) == len(set(shards))
