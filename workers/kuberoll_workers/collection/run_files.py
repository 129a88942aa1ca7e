"""The files of a run, read back: whatever wrote them, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kuberoll_workers.collection.journal import (
    DROPPED,
    FAILURES,
    read_dropped,
    read_failures,
    read_trajectories,
)
from kuberoll_workers.collection.run_directory import MANIFEST, RunManifest, read_manifest, write_atomically
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, TrajectoryKey, TrajectoryRecord


class NotARun(ValueError):
    """There are no trajectories where a run was looked for; the message says what was expected."""


class RunFiles:
    """The output of a run, for reading.

    Attributes:
        location: The directory, as it was given.
        duplicates: Lines passed over because their trajectory was there already, of what has been read so far.
    """

    def __init__(self, location: str) -> None:
        """Look for a run.

        Raises:
            NotARun: There is none.
        """
        self.location = location
        self.duplicates = 0
        self._directory = Path(location)
        if not self._directory.is_dir():
            raise NotARun(f"{location}: there is no such directory; name the output directory of a run")
        if not self._shards() and not (self._directory / MANIFEST).exists():
            raise NotARun(f"{location}: holds neither {MANIFEST} nor shard-*.jsonl: it is not a run's output")

    def _shards(self) -> list[Path]:
        return sorted(self._directory.glob("shard-*.jsonl"))

    def trajectories(self) -> Iterator[TrajectoryRecord]:
        """All finished trajectories, shard by shard, each once; streamed.

        Raises:
            RecordError: A line is not a trajectory, with file and line.
        """
        seen: set[TrajectoryKey] = set()
        for shard in self._shards():
            for record in read_trajectories(shard):
                if record.key in seen:
                    self.duplicates += 1
                    continue
                seen.add(record.key)
                yield record

    def failures(self) -> Iterator[FailureRecord]:
        """All failures, those of trajectories that were finished later included, oldest first."""
        yield from read_failures(self._directory / FAILURES)

    def dropped(self) -> Iterator[DroppedRecord]:
        """All trajectories that were not wanted."""
        yield from read_dropped(self._directory / DROPPED)

    def manifest(self) -> RunManifest | None:
        """What the run is; None for trajectories without a manifest.

        Raises:
            RunRefused: It cannot be read.
        """
        return read_manifest(self._directory)

    def write(self, name: str, data: bytes) -> str:
        """Write a file beside the run's, as a whole; where it is."""
        path = self._directory / name
        write_atomically(path, data)
        return str(path)
