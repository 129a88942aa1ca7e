"""Two workers of one shard in an object store, at any pace: what either has stored stays, and counts once.

A worker that is cut off goes on without knowing that a successor has begun. Nothing of theirs is locked: schedules
decide which of them takes the next step, each request to the store being one, so that either may stand still for as
long as the other takes to do all of its work, and wake up in the middle of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from kuberoll_workers.data.record import TrajectoryKey, TrajectoryRecord
from kuberoll_workers.output import records
from kuberoll_workers.output.part_journal import PartLimits
from kuberoll_workers.output.storage import ObjectStorage
from kuberoll_workers.output.store import ResultStore
from kuberoll_workers.output.trajectories import Trajectories
from tests.output.support import Observed, failure, record

TASKS = 3
SHARD = records.shard_name(0)
AT_ONCE = PartLimits(max_seconds=0.0, attempts=1)
REQUESTS = frozenset({"ls", "exists", "open", "pipe_file", "put_file", "cat_file", "rm", "rm_file", "info"})


class Holder:
    """A worker in a thread of its own, which goes on to its next request when it is told to.

    Attributes:
        told: Keys of trajectories that it has been told to be stored.
        error: What it failed with.
    """

    def __init__(self, work: Callable[[Holder], None]) -> None:
        self.told: set[TrajectoryKey] = set()
        self.error: BaseException | None = None
        self.over = False
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        self._stands.acquire()

    def _run(self, work: Callable[[Holder], None]) -> None:
        try:
            self.pause()
            work(self)
        except BaseException as error:
            self.error = error
        self.over = True
        self._stands.release()

    def pause(self) -> None:
        """Stand still until the next step."""
        self._stands.release()
        self._go.acquire()

    def step(self) -> None:
        """Make one request, and do what follows from it."""
        if not self.over:
            self._go.release()
            self._stands.acquire()

    def finish(self) -> None:
        """Do everything that is left."""
        while not self.over:
            self.step()
        self._thread.join()


class Paced:
    """A store whose requests wait for the steps of a holder."""

    def __init__(self, store: Any, holder: Holder) -> None:
        self._store, self._holder = store, holder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in REQUESTS:
            return found

        def request(*arguments: Any, **named: Any) -> Any:
            self._holder.pause()
            return found(*arguments, **named)

        return request


def work_on(location: str, parquet: bool) -> Callable[[Holder], None]:
    """A worker as in a pod: it reads what is stored, runs what is missing, and merges the shard when it is done."""

    async def work(holder: Holder) -> None:
        # One request at a time.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        storage = ObjectStorage(location, AT_ONCE)
        storage._fs = Paced(storage._fs, holder)
        storage.hold_shards([0])
        store = ResultStore(
            storage,
            shards=[0],
            shard_count=1,
            repeats={"env": 1},
            turns=None,
            seconds=Observed(),
            stored=lambda result: holder.told.add(result.key),
        )
        for number in range(TASKS):
            if TrajectoryKey(number, 0) not in store.state.stored:
                # What two workers sample of one trajectory is not the same with a real engine.
                mine: dict[str, Any] = {"total_reward": float(id(holder) % 1000), "metadata": {"by": uuid.uuid4().hex}}
                await store.result(record(number, **mine))
        await store.result(failure(TASKS + 1, cause=uuid.uuid4().hex))
        await store.close()
        await store.finalize(parquet=parquet)

    return lambda holder: asyncio.run(work(holder))


@pytest.fixture(scope="module", autouse=True)
def properties_of_several_threads() -> Iterator[None]:
    """Cached properties without the lock that all objects of a class share in Python 3.11: processes have none."""
    found = [item for item in vars(Trajectories).values() if isinstance(item, functools.cached_property)]
    locks = [(item, item.lock) for item in found if hasattr(item, "lock")]
    for item, _ in locks:
        item.lock = contextlib.nullcontext()
    yield
    for item, lock in locks:
        item.lock = lock


def counted(location: str) -> dict[TrajectoryKey, Any]:
    """Of each trajectory the line that counts."""
    storage = ObjectStorage(location, AT_ONCE)
    lines = [line for line in Trajectories([storage], shards=[SHARD]) if isinstance(line, TrajectoryRecord)]
    found = {line.key: line.metadata for line in lines}
    assert len(found) == len(lines)
    return found


@settings(
    max_examples=30,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 25)), max_size=24), st.booleans())
# The first one stands still in the middle of reading, and of merging, while the other does everything.
@example([(0, 8), (1, 200), (0, 200)], False)
@example([(0, 20), (1, 200), (0, 200)], False)
def test_two_workers_of_one_shard_at_any_pace_lose_nothing_and_each_trajectory_counts_once(
    schedule: list[tuple[int, int]], parquet: bool
) -> None:
    location = f"memory://holders-{uuid.uuid4().hex}/run"
    holders = [Holder(work_on(location, parquet)) for _ in range(2)]
    try:
        told: set[TrajectoryKey] = set()
        for number, steps in schedule:
            for _ in range(steps):
                holders[number].step()
            # Whoever reads meanwhile finds what anybody was told to be stored.
            told = {key for holder in holders for key in holder.told if key.task_index < TASKS}
            assert told <= counted(location).keys()
        for holder in holders:
            holder.finish()
        assert [holder.error for holder in holders] == [None, None]
        assert counted(location).keys() == {TrajectoryKey(number, 0) for number in range(TASKS)}
        # Everybody agrees on which line counts, and it stays the one when a successor looks once more.
        last = counted(location)
        Holder(work_on(location, parquet)).finish()
        assert counted(location) == last
    finally:
        for holder in holders:
            holder.finish()
        fsspec.filesystem("memory").store.clear()
