"""The files of a run, read back: whatever wrote them, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator

from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.output.run_directory import MANIFEST, RunManifest, read_manifest
from kuberoll_workers.output.storage import StorageError, open_storage
from kuberoll_workers.output.trajectories import Trajectories


class NotARun(ValueError):
    """There are no trajectories where a run was looked for; the message says what was expected."""


class RunFiles:
    """The output of a run, for reading.

    Attributes:
        location: The directory or URI, as it was given.
        storage: What is behind it.
    """

    def __init__(self, location: str) -> None:
        """Look for a run.

        Raises:
            NotARun: There is none.
        """
        self.location = location
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

    def read(self) -> Trajectories:
        """The trajectories that are stored now, each once, however it ended."""
        return Trajectories([self.storage])

    def trajectories(self) -> Iterator[TrajectoryRecord]:
        """The finished ones of them, in the order in which they are stored; streamed.

        Raises:
            RecordError: A shard's Parquet file is none.
        """
        return self.read().finished()

    def manifest(self) -> RunManifest | None:
        """What the run is; None for trajectories without a manifest.

        Raises:
            RunRefused: It cannot be read.
        """
        return read_manifest(self.storage)

    def write(self, name: str, data: bytes) -> str:
        """Write a file beside the run's, as a whole; where it is."""
        return self.storage.write(name, data)
