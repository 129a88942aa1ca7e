"""The files of a run, read back: whatever wrote them, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator

from kuberoll_workers.collection import records
from kuberoll_workers.collection.keys import KeySet
from kuberoll_workers.collection.run_directory import MANIFEST, RunManifest, read_manifest
from kuberoll_workers.collection.storage import StorageError, open_storage
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryRecord


class NotARun(ValueError):
    """There are no trajectories where a run was looked for; the message says what was expected."""


class RunFiles:
    """The output of a run, for reading.

    Attributes:
        location: The directory or URI, as it was given.
        storage: What is behind it.
        duplicates: Lines passed over because their trajectory was there already, of what has been read so far.
    """

    def __init__(self, location: str) -> None:
        """Look for a run.

        Raises:
            NotARun: There is none.
        """
        self.location = location
        self.duplicates = 0
        try:
            self.storage = open_storage(location)
            shards, manifest = self.storage.shards(), self.storage.read(MANIFEST)
        except StorageError as error:
            raise NotARun(str(error)) from error
        except Exception as error:
            # Every object store's library raises its own kinds: no such bucket, no credentials, no network.
            raise NotARun(f"{location}: {type(error).__name__}: {error}") from error
        if not shards and manifest is None:
            raise NotARun(
                f"{location}: there is neither {MANIFEST} nor shard-*.jsonl there: name the output directory of a run"
            )

    def trajectories(self) -> Iterator[TrajectoryRecord]:
        """All finished trajectories, shard by shard, each once; streamed.

        Raises:
            RecordError: A line is not a trajectory, with file and line.
        """
        seen = KeySet()
        for shard in self.storage.shards():
            for record in records.trajectories(self.storage, shard):
                if record.key in seen:
                    self.duplicates += 1
                    continue
                seen.add(record.key)
                yield record

    def failures(self) -> Iterator[FailureRecord]:
        """All failures, those of trajectories that were finished later included, oldest first."""
        yield from records.failures(self.storage)

    def dropped(self) -> Iterator[DroppedRecord]:
        """All trajectories that were not wanted."""
        yield from records.dropped(self.storage)

    def manifest(self) -> RunManifest | None:
        """What the run is; None for trajectories without a manifest.

        Raises:
            RunRefused: It cannot be read.
        """
        return read_manifest(self.storage)

    def write(self, name: str, data: bytes) -> str:
        """Write a file beside the run's, as a whole; where it is."""
        return self.storage.write(name, data)
