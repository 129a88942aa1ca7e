"""Check of the whole dataset before anything expensive starts."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.shards import shard_of
from kuberoll_workers.dataset.expansion import PromptGroup, expand
from kuberoll_workers.dataset.passes import passes
from kuberoll_workers.dataset.reading import EnvironmentSource, accepted, read_rows
from kuberoll_workers.dataset.row_checks import RowChecks
from kuberoll_workers.dataset.rows import SOURCE_FIELD, DatasetError, Row
from kuberoll_workers.environments.registry import UnusableEnvironment

_ROWS_AHEAD = 256
BLOCK_ROWS = 256
"""Maximum number of rows with a common digest, which is checked before the first of them is run."""

_BLOCK_BYTES = 4 << 20

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSummary:
    """Summary of a dataset: counts, and a digest of the content of all rows in order, independent of the file format.

    Rows are those of one pass; rollouts and trajectories are of all, or None if passes have no end.

    Attributes:
        rollouts: Maximum number of samples of a task, including oversampling.
        trajectories_of: Trajectories by environment; of one pass if passes have no end.
        rows_of_sources: Number of rows of each source, if the dataset has several.
        rows_of_shards: Number of rows of each shard, if a consumer holds the run back; else None.
        blocks: Digest of every block of rows, to verify later readings.
        tools_at: The first row that declares tools; None: none does.
    """

    rows: int
    tasks: int
    rollouts: int | None
    trajectories: int | None
    trajectories_of: dict[str, int]
    digest: str
    blocks: tuple[str, ...]
    rows_of_sources: dict[str, int] = field(default_factory=dict)
    rows_of_shards: list[int] | None = None
    tools_at: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Form in a run's manifest."""
        known = {"rows": self.rows, "trajectories": self.trajectories, "digest": self.digest}
        return known if self.rows_of_shards is None else known | {"rows_of_shards": self.rows_of_shards}


def prompt_groups(
    job: RolloutJob,
    *,
    base: Path,
    environment: EnvironmentSource,
    blocks: Sequence[str] | None = None,
    epochs: int | None = None,
) -> Iterator[PromptGroup]:
    """All prompt groups of a job in order, the same in every process.

    Files are read ahead in a thread, so that an event loop that takes the groups does not wait for the network.

    Args:
        base: The manifest's directory.
        environment: Creates an environment by name, if rows are generated.
        blocks: Digests of the rows that the run was checked with; None to accept all rows.
        epochs: Number of passes over the rows; None: the job's. All tasks are in the first.

    Raises:
        DatasetError: A row is invalid, or the rows do not match `blocks`.
    """
    dataset = job.spec.dataset
    oversample = job.spec.rollout.groups.oversample
    rows: Iterator[Row] = _rows(job, base, environment)
    sources = [source for _, source in dataset.located_sources()]
    if blocks is not None:
        rows = verify_rows(rows, blocks)
    if any(source.uri is not None or source.huggingface is not None for source in sources):
        rows = read_ahead(rows, _ROWS_AHEAD)
    rows = passes(rows, dataset.epochs if epochs is None else epochs, seed=dataset.shuffle_seed)
    return expand(rows, repeats_of(job), oversample=oversample)


def verify_rows(rows: Iterable[Row], blocks: Sequence[str]) -> Iterator[Row]:
    """The same rows, each returned only after its block matched its digest.

    Raises:
        DatasetError: Rows were changed, added or removed; the message names them.
    """
    expected = iter(blocks)
    number = 0
    for block in _blocks(rows):
        digest = next(expected, None)
        if digest is None:
            raise _changed(f"it now has more than {number} rows: {block[0].where} is new")
        if _digest(block) != digest:
            raise _changed(f"rows {number + 1} to {number + len(block)} ({block[0].where} to {block[-1].where}) differ")
        number += len(block)
        yield from block
    if next(expected, None) is not None:
        raise _changed(f"it now has only {number} rows")


def _changed(what: str) -> DatasetError:
    return DatasetError(
        f"spec.dataset: the rows are not those that this run was checked with: {what}. Changed rows would be "
        "mixed with others under one digest: restore the dataset and resume, or start a new run with another "
        "--output. If an environment generates the rows, generate_dataset must return the same ones each time"
    )


def _blocks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    block: list[Row] = []
    size = 0
    for row in rows:
        block.append(row)
        size += len(row.content)
        if len(block) == BLOCK_ROWS or size >= _BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _digest(block: Iterable[Row]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for row in block:
        # The length separates adjacent rows.
        digest.update(len(row.content).to_bytes(8, "little") + row.content)
    return digest.hexdigest()


def read_ahead(items: Iterator[_Item], count: int) -> Generator[_Item]:
    """The same items in the same order, read by a thread that is at most `count` + 1 items ahead.

    Exceptions of `items` are raised at their position. The thread ends with the generator.
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
        # The thread may be waiting for space in the queue; emptying it lets the thread end.
        with contextlib.suppress(queue.Empty):
            while True:
                ready.get_nowait()
        thread.join()


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def repeats_of(job: RolloutJob) -> dict[str, int]:
    """Number of samples per prompt, by environment name."""
    default = job.spec.dataset.repeats
    return {item.name: item.repeats if item.repeats is not None else default for item in job.spec.environments}


def scan(
    job: RolloutJob,
    *,
    base: Path,
    environment: EnvironmentSource,
    refused: Callable[[DatasetError], None] | None = None,
    shards: int = 1,
) -> InputSummary:
    """Read and check every row once, also by the environments that will score them.

    Args:
        shards: Number of the run's shards.
        refused: Called with the error of each invalid row, which is then left out; None to raise the first.

    Raises:
        DatasetError: A row is invalid, or there are no rows.
    """
    digest = hashlib.blake2b(digest_size=16)
    blocks: list[str] = []

    def watched(rows: Iterator[Row]) -> Iterator[Row]:
        for block in _blocks(rows):
            blocks.append(_digest(block))
            for row in block:
                digest.update(row.content)
                yield row

    rows = tasks = rollouts = 0
    tools_at: str | None = None
    rows_of_shards = [0] * shards
    counts = {item.name: 0 for item in job.spec.environments}
    sources = {part.name: 0 for part in job.spec.dataset.sources}
    oversample = job.spec.rollout.groups.oversample
    valid = checked_rows(job, base=base, environment=environment, refused=refused)
    for group in expand(watched(valid), repeats_of(job), oversample=oversample):
        rows += 1
        tasks = max(tasks, group.task_index + 1)
        rows_of_shards[shard_of(group.task_index, shards)] += 1
        rollouts = max(rollouts, group.rollout_indexes.stop)
        counts[group.row.task_name] += group.keep
        if group.row.tools and tools_at is None:
            tools_at = group.row.where
        if sources and group.row.metadata is not None:
            sources[group.row.metadata[SOURCE_FIELD]] += 1
    if rows == 0:
        raise DatasetError("spec.dataset: there are no rows")
    epochs = job.spec.dataset.epochs
    return InputSummary(
        rows=rows,
        tasks=tasks,
        rollouts=None if epochs is None else rollouts * epochs,
        trajectories=None if epochs is None else sum(counts.values()) * epochs,
        trajectories_of={name: count * (epochs or 1) for name, count in counts.items()},
        digest=digest.hexdigest(),
        blocks=tuple(blocks),
        rows_of_sources=sources,
        tools_at=tools_at,
        rows_of_shards=rows_of_shards if job.spec.rollout.on_policy is not None else None,
    )


def checked_rows(
    job: RolloutJob,
    *,
    base: Path,
    environment: EnvironmentSource,
    refused: Callable[[DatasetError], None] | None = None,
) -> Iterator[Row]:
    """All rows of a job in order that are valid, also for the environments that will score them.

    Args:
        refused: As in `scan`.

    Raises:
        DatasetError: A row is invalid.
    """
    checks = _row_checks(job)

    def checked(row: Row) -> Row:
        checks.check(row)
        return row

    yield from accepted(_rows(job, base, environment, refused), checked, refused)


def _row_checks(job: RolloutJob) -> RowChecks:
    try:
        return RowChecks(job.spec.environments)
    except UnusableEnvironment as error:
        raise DatasetError(f"spec.environments: {error}", error.traceback) from error


def _rows(
    job: RolloutJob,
    base: Path,
    environment: EnvironmentSource,
    refused: Callable[[DatasetError], None] | None = None,
) -> Iterator[Row]:
    names = [item.name for item in job.spec.environments]
    gym_agents = [item.name for item in job.spec.environments if item.is_gym_agent]
    rows = read_rows(
        job.spec.dataset,
        base=base,
        task_names=names,
        environment=environment,
        refused=refused,
        gym_agents=gym_agents,
        types={item.name: kind for item in job.spec.environments if (kind := item.constructor[0]) is not None},
    )
    if not job.spec.generation.sampling.override:
        return rows
    return (dataclasses.replace(row, sampling={}, seed=None) for row in rows)
