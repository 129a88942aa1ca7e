"""Reader of a run's stored trajectories, each once; all commands share it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import chain

from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryKey, TrajectoryRecord
from kuberoll_workers.output import records
from kuberoll_workers.output.key_set import KeySet
from kuberoll_workers.output.precedence import EndedRecord, Precedence
from kuberoll_workers.output.storage import Storage

Check = Callable[[TrajectoryRecord, str, str], None]
"""Check of a record, with the name of its shard and its position, `file:line`."""

_JOURNALS = (records.FAILURES, records.DROPPED)


class Trajectories:
    """Trajectories of a run: of several lines of one, the line that counts by the rule of `precedence`.

    Records are streamed. Memory: 16 bytes for each stored line while keys are compared, before the first record; then
    about 70 bytes for each trajectory of the shard that is read and for each that failed or was dropped, and 300 for
    each that has several lines.
    """

    def __init__(
        self, storages: Sequence[Storage], *, shards: Collection[str] | None = None, check: Check | None = None
    ) -> None:
        """Prepare to read; nothing is read yet.

        Args:
            storages: Storage of the run, or several that hold parts of it.
            shards: Names of the shards to read; None for all.
            check: Called with each line of a finished trajectory, including lines that do not count.
        """
        self._storages = storages
        self._names = shards
        self._check = check

    def __iter__(self) -> Iterator[EndedRecord]:
        """All trajectories: first the finished ones, then those that failed permanently, then the dropped ones.

        Each comes once, whatever is written, merged or converted meanwhile.

        Raises:
            RecordError: A shard's Parquet file is invalid.
        """
        # Before the other keys: who is found too old from now on still counts as finished, here and below.
        self._overruled  # noqa: B018
        unfinished = Precedence(self._keys(_JOURNALS), self._not_finished)
        ended, finished = KeySet(self._keys(_JOURNALS)), KeySet()
        for record in self.finished():
            if record.key in ended:
                finished.add(record.key)
            yield record
        counts = unfinished.selector()
        for other in self._not_finished():
            if other.key in ended and other.key not in finished and counts(other):
                finished.add(other.key)
                yield other

    def finished(self) -> Iterator[TrajectoryRecord]:
        """The finished trajectories, in the order in which they are stored.

        Raises:
            RecordError: A shard's Parquet file is invalid.
        """
        return chain.from_iterable(found for _, found in self.by_shard())

    def by_shard(self) -> Iterator[tuple[str, Iterator[TrajectoryRecord]]]:
        """The finished trajectories by shard name; the shards must be read in turn."""
        for shard, found in self.lines_by_shard():
            yield shard, (line.record for line in found)

    def lines_by_shard(self) -> Iterator[tuple[str, Iterator[records.ShardLine]]]:
        """`by_shard` with the line of each trajectory."""
        counts = self.precedence.selector()
        for storage, shard in self._shards():
            yield shard, self._counted(storage, shard, counts)

    def _counted(
        self, storage: Storage, shard: str, counts: Callable[[EndedRecord], bool]
    ) -> Iterator[records.ShardLine]:
        had = KeySet()
        for line in self._lines(storage, shard):
            # A file that is merged into another meanwhile may be read in both.
            if (key := line.record.key) not in self._overruled and key not in had and counts(line.record):
                had.add(key)
                yield line

    @cached_property
    def _overruled(self) -> KeySet:
        """Trajectories that have finished, perhaps, and do not count as finished."""
        return KeySet(chain.from_iterable(map(records.overruled, self._storages)))

    @cached_property
    def precedence(self) -> Precedence:
        """Choice among the lines of finished trajectories."""
        shards = self._shards()
        keys = chain.from_iterable(records.keys(*shard) for shard in shards)
        return Precedence(keys, lambda: (line.record for shard in shards for line in self._lines(*shard)))

    def _shards(self) -> list[tuple[Storage, str]]:
        return [
            (storage, shard)
            for storage in self._storages
            for shard in (storage.shards() if self._names is None else self._names)
        ]

    def _lines(self, storage: Storage, shard: str) -> Iterator[records.ShardLine]:
        for line in records.shard_lines(storage, shard):
            if self._check is not None:
                self._check(line.record, shard, line.where)
            yield line

    def _not_finished(self) -> Iterator[FailureRecord | DroppedRecord]:
        yield from chain.from_iterable(map(records.failures, self._storages))
        yield from chain.from_iterable(map(records.dropped, self._storages))

    def _keys(self, journals: Sequence[str]) -> Iterator[TrajectoryKey]:
        return chain.from_iterable(records.keys(storage, name) for storage in self._storages for name in journals)
