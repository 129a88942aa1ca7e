"""The output of a run on this machine: the checks of its command line, and what it may continue."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.record import RecordError
from kuberoll_workers.dataset.inputs import repeats_of
from kuberoll_workers.local.errors import describe_error
from kuberoll_workers.local.options import RunOptions
from kuberoll_workers.local.preflight import JobRefused, Preflight
from kuberoll_workers.output.run_directory import RunDirectory, RunManifest, RunRefused, check_contents, new_manifest
from kuberoll_workers.output.run_state import read_state
from kuberoll_workers.output.storage import DirectoryStorage, Storage, StorageError, open_storage
from kuberoll_workers.worker.environments import remote_digests


def storage_of(output: str) -> Storage:
    """Open the storage of `--output`.

    Raises:
        JobRefused: A run on this machine cannot write there.
    """
    if output.startswith("pvc:"):
        raise JobRefused(
            f"--output {output}: this is a volume of a cluster; give a directory or an object store with --output"
        )
    if output.startswith("memory:"):
        raise JobRefused(f"--output {output}: memory belongs to one process, and a run has several: give a directory")
    try:
        return open_storage(output)
    except StorageError as error:
        raise JobRefused(f"--output {error}") from error


@contextmanager
def _refusals(output: str) -> Iterator[None]:
    """Convert errors of an output.

    Raises:
        JobRefused: It cannot be used.
    """
    try:
        yield
    except (RunRefused, RecordError, StorageError, OSError) as error:
        raise JobRefused(describe_error(error)) from error
    except Exception as error:
        # Every object store's library raises its own exceptions.
        raise JobRefused(f"--output {output}: {type(error).__name__}: {error}") from error


def check_output(storage: Storage, options: RunOptions) -> RunManifest | None:
    """Check the output before everything that takes longer; it is checked again when it is locked.

    Returns:
        Manifest of the run to continue; None: there is none.

    Raises:
        JobRefused: It contains a run, which must not be resumed, or something else.
    """
    with _refusals(options.output):
        return check_contents(storage, resume=options.resume, force=options.force)


def open_run(directory: RunDirectory, job: RolloutJob, options: RunOptions, preflight: Preflight, shards: int) -> bool:
    """Open the run's directory and check that what is stored can be continued; True if there is an earlier part.

    Raises:
        JobRefused: It cannot be used.
    """
    inputs = preflight.inputs
    with _refusals(options.output):
        resumed = directory.open(
            new_manifest(
                job,
                shards=shards,
                inputs=inputs.as_json(),
                code=remote_digests(job),
                sources=preflight.source.sources,
            ),
            resume=options.resume,
            force=options.force,
        )
        if resumed:
            # The workers check this too, but only after the engine has started.
            read_state(
                directory.storage,
                shards=range(shards),
                shard_count=shards,
                repeats=repeats_of(job),
                logs={},
                tasks=None if options.force else inputs.tasks,
                rollouts=None if options.force else inputs.rollouts,
            )
    return resumed


def local_directory(job: RolloutJob, storage: Storage) -> Path:
    """Local directory of a run for logs and turn journals: its output, if that is a directory."""
    if isinstance(storage, DirectoryStorage):
        return storage.path
    place = hashlib.blake2b(storage.location.encode(), digest_size=4).hexdigest()
    return Path("runs") / f"{job.metadata.name}-{place}"
