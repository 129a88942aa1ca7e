"""A look at the whole dataset before anything expensive starts."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kuberoll_api.rolloutjob import RolloutJob
from kuberoll_workers.collection.dataset import EnvironmentSource, read_rows
from kuberoll_workers.collection.expansion import PromptGroup, expand
from kuberoll_workers.collection.rows import DatasetError, Row

_ROWS_AHEAD = 256

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSummary:
    """What a dataset comes to: counts, and a digest of what all rows say, in order, in whatever container they are."""

    rows: int
    tasks: int
    trajectories: int
    trajectories_of: dict[str, int]
    digest: str

    def as_json(self) -> dict[str, Any]:
        """The form in which a run's manifest holds it."""
        return {"rows": self.rows, "trajectories": self.trajectories, "digest": self.digest}


def prompt_groups(job: RolloutJob, *, base: Path, environment: EnvironmentSource) -> Iterator[PromptGroup]:
    """All prompt groups of a job in order; the same ones in every process that asks.

    Files are read in a thread, some rows ahead: who takes the groups on an event loop does not wait for a network.

    Args:
        base: The manifest's directory.
        environment: Makes an environment by name, where rows are generated.

    Raises:
        DatasetError: A row is not usable.
    """
    oversample = job.spec.rollout.groups.oversample
    rows: Iterator[Row] = _rows(job, base, environment)
    source = job.spec.dataset.source
    if source.uri is not None or source.huggingface is not None:
        rows = read_ahead(rows, _ROWS_AHEAD)
    return expand(rows, repeats_of(job), oversample=oversample)


def read_ahead(items: Iterator[_Item], count: int) -> Generator[_Item]:
    """The same items in the same order, taken in a thread of its own, at most `count` and one before they are wanted.

    What `items` raises is raised in its place. The thread ends with the generator.
    """
    ready: queue.Queue[_Item | _End] = queue.Queue(count)
    stop = threading.Event()

    def take() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                ready.put(item)
                if stop.is_set():
                    return
        except BaseException as raised:
            error = raised
        ready.put(_End(error))

    thread = threading.Thread(target=take, name="kuberoll-rows", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        # The thread may be waiting for a place; what it adds after that finds one.
        with contextlib.suppress(queue.Empty):
            while True:
                ready.get_nowait()
        thread.join()


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def repeats_of(job: RolloutJob) -> dict[str, int]:
    """Samples per prompt, by environment name."""
    default = job.spec.dataset.repeats
    return {item.name: item.repeats if item.repeats is not None else default for item in job.spec.environments}


def scan(job: RolloutJob, *, base: Path, environment: EnvironmentSource) -> InputSummary:
    """Read and check every row once.

    Raises:
        DatasetError: The first row that is not usable, or that there is none.
    """
    digest = hashlib.blake2b(digest_size=16)

    def watched(rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            digest.update(row.content)
            yield row

    rows = tasks = 0
    counts = {item.name: 0 for item in job.spec.environments}
    for group in expand(watched(_rows(job, base, environment)), repeats_of(job)):
        rows += 1
        tasks = max(tasks, group.task_index + 1)
        counts[group.row.task_name] += group.keep
    if rows == 0:
        raise DatasetError("spec.dataset: there is not a single row")
    return InputSummary(
        rows=rows,
        tasks=tasks,
        trajectories=sum(counts.values()),
        trajectories_of=counts,
        digest=digest.hexdigest(),
    )


def _rows(job: RolloutJob, base: Path, environment: EnvironmentSource) -> Iterator[Row]:
    names = [item.name for item in job.spec.environments]
    return read_rows(job.spec.dataset, base=base, task_names=names, environment=environment)
