"""Store of a worker's results and turns: a journal for each shard, and for failures and dropped trajectories."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from kuberoll_workers.data.record import (
    DroppedRecord,
    FailureRecord,
    TrajectoryRecord,
    TurnRecord,
    Unstorable,
    failure_to_store,
)
from kuberoll_workers.data.shards import shard_of
from kuberoll_workers.output import records
from kuberoll_workers.output.group_ends import GroupEnds
from kuberoll_workers.output.journal import Journal, WriteObserver
from kuberoll_workers.output.part_feed import PartFeed
from kuberoll_workers.output.run_state import RunState, read_state, resumes_from_turns
from kuberoll_workers.output.storage import Storage
from kuberoll_workers.output.turn_log import TurnLog

Result = TrajectoryRecord | FailureRecord | DroppedRecord

_PENDING_BYTES = 64 << 20
_SHARED = (records.FAILURES, records.DROPPED)


class ResultStore:
    """Stores results. Writing blocks nobody, unless too many bytes are waiting to be written."""

    def __init__(
        self,
        storage: Storage,
        *,
        shards: Collection[int],
        shard_count: int,
        repeats: Mapping[str, int],
        turns: Path | None,
        seconds: WriteObserver,
        stored: Callable[[Result], None],
        tasks: int | None = None,
        rollouts: int | None = None,
        pending_bytes: int = _PENDING_BYTES,
        feed: PartFeed | None = None,
        oversample: int = 0,
    ) -> None:
        """Read the existing state, and open the journals for appending.

        Args:
            repeats: Samples of a whole group, by environment.
            turns: Directory of the turn log; None if turns are not journaled.
            seconds: Told the wall seconds of each write.
            stored: Called with each result when it is durable.
            tasks, rollouts: Number of tasks in the dataset, and maximum number of samples of a task; None if unknown.
            pending_bytes: Maximum number of bytes that wait to be written before `result` blocks.
            feed: Takes the parts that are written to an object store; None: nobody does.
            oversample: Samples of a group beyond `repeats`.

        Raises:
            RecordError: A line does not belong to this run; the message names file and line.
        """
        self._storage = storage
        self._shard_count = shard_count
        self._stored = stored
        self._pending_bytes = pending_bytes
        self._pending = 0
        # A worker that was believed dead, and its replacement, must not overwrite each other's parts.
        owner = f"worker-{min(shards, default=0):05d}-{uuid.uuid4().hex[:8]}"
        self._names = {shard: records.shard_name(shard) for shard in shards}
        self._journals = {
            name: storage.journal(
                name,
                owner=owner,
                seconds=seconds,
                shared=name in _SHARED,
                written=None if feed is None else feed.written,
            )
            for name in (*self._names.values(), *_SHARED)
        }
        self.logs = {} if turns is None else {shard: TurnLog(turns, shard, seconds=seconds) for shard in shards}
        self.state: RunState = read_state(
            storage,
            shards=shards,
            shard_count=shard_count,
            repeats=repeats,
            logs=self.logs,
            tasks=tasks,
            rollouts=rollouts,
            oversample=oversample,
        )
        self._feed, self._ends = feed, GroupEnds(repeats=repeats, oversample=oversample, stored=self.state.stored)
        if feed is not None:
            feed.attach(self._journals.values(), shards=sorted(shards))

    async def turn(self, turn: TurnRecord) -> None:
        """Log one complete turn.

        Raises:
            OSError: An earlier turn could not be written.
        """
        await self.logs[shard_of(turn.task_index, self._shard_count)].append(turn)

    async def result(self, result: Result) -> None:
        """Schedule the storage of one result; returns when it is written, or will be soon.

        A result that cannot be encoded is stored as a failure with the reason.

        Raises:
            JournalBroken: An earlier result could not be written.
        """
        try:
            written, size = self._journal_of(result).add(result)
        except Unstorable as error:
            # Only this trajectory fails, not the worker.
            result = failure_to_store(result, error)
            written, size = self._journal_of(result).add(result)
        self._pending += size
        written.add_done_callback(functools.partial(self._done, result=result, size=size))
        if self._feed is not None and self._ends.ends(result):
            self._feed.due()
        if self._pending > self._pending_bytes:
            await asyncio.shield(written)

    def _journal_of(self, result: Result) -> Journal:
        if isinstance(result, FailureRecord):
            return self._journals[records.FAILURES]
        if isinstance(result, DroppedRecord):
            return self._journals[records.DROPPED]
        return self._journals[self._names[shard_of(result.task_index, self._shard_count)]]

    def _done(self, written: asyncio.Future[None], *, result: Result, size: int) -> None:
        self._pending -= size
        if written.cancelled() or written.exception() is not None:
            return
        # An unscored trajectory's own line has its turns.
        kept = isinstance(result, FailureRecord) and resumes_from_turns(result) and not result.unscored
        if self.logs and not kept:
            self.logs[shard_of(result.task_index, self._shard_count)].ended((result.key,))
        self._stored(result)

    async def close(self) -> None:
        """Finish pending writes.

        Raises:
            JournalBroken: A record could not be written.
        """
        broken: OSError | None = None
        for close in [opened.close for opened in self._journals.values()] + [log.close for log in self.logs.values()]:
            try:
                await close()
            except OSError as error:
                broken = broken or error
        if broken is not None:
            raise broken

    async def finalize(self, *, parquet: bool) -> None:
        """Convert the shards into their final format, once all of them are done and closed."""
        for name in self._names.values():
            if parquet:
                await asyncio.to_thread(records.to_parquet, self._storage, name)
            else:
                await asyncio.to_thread(self._storage.compact, name)
