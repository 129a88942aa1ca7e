"""The trajectories that a run has stored, each once: the one reader that all commands share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import chain

from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryKey, TrajectoryRecord
from kuberoll_workers.output import records
from kuberoll_workers.output.keys import KeySet
from kuberoll_workers.output.precedence import EndedRecord, Precedence
from kuberoll_workers.output.storage import Storage

Check = Callable[[TrajectoryRecord, str, str], None]
"""Looks at a record, given the name of its shard and where it is, `file:line`."""

_JOURNALS = (records.FAILURES, records.DROPPED)


class Trajectories:
    """The trajectories of a run: of several lines of one, that which counts by the rule of `precedence`.

    Records are streamed. Memory: 16 bytes for each stored line while keys are compared, before the first record; then
    some 70 bytes for each trajectory that failed or was dropped, and 300 for each that has several lines.
    """

    def __init__(
        self, storages: Sequence[Storage], *, shards: Collection[str] | None = None, check: Check | None = None
    ) -> None:
        """Read nothing yet.

        Args:
            storages: Where the run is: one place, or several that hold parts of it.
            shards: Names of the shards to read; None: all.
            check: Called with each line of a finished trajectory, those that do not count included.
        """
        self._storages = storages
        self._names = shards
        self._check = check

    def __iter__(self) -> Iterator[EndedRecord]:
        """All of them: the finished ones first, then those that failed for good, then those that were dropped.

        Raises:
            RecordError: A shard's Parquet file is none.
        """
        unfinished = Precedence(self._keys(_JOURNALS), self._not_finished)
        ended, finished = KeySet(self._keys(_JOURNALS)), KeySet()
        for record in self.finished():
            if record.key in ended:
                finished.add(record.key)
            yield record
        counts = unfinished.selector()
        yield from (record for record in self._not_finished() if record.key not in finished and counts(record))

    def finished(self) -> Iterator[TrajectoryRecord]:
        """The finished ones, in the order in which they are stored.

        Raises:
            RecordError: A shard's Parquet file is none.
        """
        return chain.from_iterable(found for _, found in self.by_shard())

    def by_shard(self) -> Iterator[tuple[str, Iterator[TrajectoryRecord]]]:
        """The finished ones with the names of their shards, which are to be read in turn."""
        counts = self.precedence.selector()
        for storage, shard in self._shards():
            yield shard, filter(counts, self._lines(storage, shard))

    @cached_property
    def precedence(self) -> Precedence:
        """The choice among the lines of finished trajectories."""
        shards = self._shards()
        keys = chain.from_iterable(records.keys(*shard) for shard in shards)
        return Precedence(keys, lambda: chain.from_iterable(self._lines(*shard) for shard in shards))

    def _shards(self) -> list[tuple[Storage, str]]:
        return [
            (storage, shard)
            for storage in self._storages
            for shard in (storage.shards() if self._names is None else self._names)
        ]

    def _lines(self, storage: Storage, shard: str) -> Iterator[TrajectoryRecord]:
        for line in records.shard_lines(storage, shard):
            if self._check is not None:
                self._check(line.record, shard, line.where)
            yield line.record

    def _not_finished(self) -> Iterator[FailureRecord | DroppedRecord]:
        yield from chain.from_iterable(map(records.failures, self._storages))
        yield from chain.from_iterable(map(records.dropped, self._storages))

    def _keys(self, journals: Sequence[str]) -> Iterator[TrajectoryKey]:
        return chain.from_iterable(records.keys(storage, name) for storage in self._storages for name in journals)
