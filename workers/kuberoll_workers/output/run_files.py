"""Reading of a run's files, in any format and storage."""

from __future__ import annotations

from collections.abc import Iterator

from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.output.manifest import MANIFEST, RunManifest, read_manifest
from kuberoll_workers.output.storage import StorageError, open_storage
from kuberoll_workers.output.trajectories import Trajectories


class NotARun(ValueError):
    """There is no run at this location; the message says what was expected."""


class RunFiles:
    """Output of a run, for reading.

    Attributes:
        location: Directory or URI, as given.
        storage: Storage at the location.
    """

    def __init__(self, location: str) -> None:
        """Open a run.

        Raises:
            NotARun: There is no run.
        """
        self.location = location
        try:
            self.storage = open_storage(location)
            shards, manifest = self.storage.shards(), self.storage.read(MANIFEST)
        except StorageError as error:
            raise NotARun(str(error)) from error
        except Exception as error:
            # Every object store's library has its own errors: missing bucket, credentials, network.
            raise NotARun(f"{location}: {type(error).__name__}: {error}") from error
        if not shards and manifest is None:
            raise NotARun(f"{location}: found neither {MANIFEST} nor shard-*.jsonl: give the output directory of a run")

    def read(self) -> Trajectories:
        """The stored trajectories, each once, whether finished, failed or dropped."""
        return Trajectories([self.storage])

    def trajectories(self) -> Iterator[TrajectoryRecord]:
        """The finished trajectories in the order in which they are stored; streamed.

        Raises:
            RecordError: A shard's Parquet file is invalid.
        """
        return self.read().finished()

    def manifest(self) -> RunManifest | None:
        """The run's manifest; None for trajectories without one.

        Raises:
            RunRefused: It cannot be read.
        """
        return read_manifest(self.storage)

    def write(self, name: str, data: bytes) -> str:
        """Write a whole file next to the run's files; returns its location."""
        return self.storage.write(name, data)
