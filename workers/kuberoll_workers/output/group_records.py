"""Stored trajectories of prompt groups that are not complete: an environment that scores groups needs them again."""

from __future__ import annotations

import tempfile
import threading
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import IO

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.record import TrajectoryKey, TrajectoryRecord, decode_line, encode_line
from kuberoll_workers.data.shards import shard_of
from kuberoll_workers.output import records
from kuberoll_workers.output.storage import Storage
from kuberoll_workers.output.trajectories import Trajectories


class GroupRecords:
    """Reader of some of a run's stored trajectories.

    A shard is read once, when the first of its trajectories is asked for. What is likely to be asked for is copied into
    a temporary file, without token ids; memory: 24 bytes for each.
    """

    def __init__(self, storage: Storage, *, shard_count: int, likely: Collection[int] = ()) -> None:
        """`likely` are the tasks some of whose trajectories are stored and some are not."""
        self._storage = storage
        self._shard_count = shard_count
        self._likely = frozenset(likely)
        self._read: set[int] = set()
        self._file: IO[bytes] | None = None
        self._tasks: dict[int, array[int]] = {}
        # Groups are scored in threads.
        self._lock = threading.Lock()

    def of(self, keys: Sequence[TrajectoryKey]) -> list[TrajectoryRecord]:
        """The stored trajectories among some of one task, without token ids and log-probabilities.

        Raises:
            RecordError: The shard's Parquet file is invalid.
            OSError: The storage cannot be read.
        """
        if not keys:
            return []
        task, wanted = keys[0].task_index, set(keys)
        with self._lock:
            shard = shard_of(task, self._shard_count)
            if shard not in self._read:
                self._copy(shard, self._likely | {task})
                self._read.add(shard)
            elif task not in self._tasks:
                self._copy(shard, {task})
            return [record for record in self._copied(task) if record.key in wanted]

    def _copy(self, shard: int, tasks: Collection[int]) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="kuberoll-")  # noqa: SIM115 - removed with this object
        for task in tasks:
            if shard_of(task, self._shard_count) == shard:
                self._tasks.setdefault(task, array("q"))
        self._file.seek(0, 2)
        for record in Trajectories([self._storage], shards=[records.shard_name(shard)]).finished():
            if record.task_index in tasks:
                self._tasks[record.task_index].append(self._file.tell())
                self._file.write(encode_line(_without_tokens(record)))

    def _copied(self, task: int) -> Iterable[TrajectoryRecord]:
        assert self._file is not None
        for offset in self._tasks[task]:
            self._file.seek(offset)
            yield decode_line(self._file.readline(), TrajectoryRecord, where="a stored trajectory")


def _without_tokens(record: TrajectoryRecord) -> TrajectoryRecord:
    messages = [replace(message, token_ids=token_array(), logprobs=None) for message in record.messages]
    return replace(record, messages=messages)
