"""A look at the whole dataset before anything expensive starts."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.dataset.expansion import PromptGroup, expand
from kuberoll_workers.dataset.reading import EnvironmentSource, read_rows
from kuberoll_workers.dataset.rows import DatasetError, Row

_ROWS_AHEAD = 256
BLOCK_ROWS = 256
"""Rows that have one digest, or fewer where they are large: they are compared before the first of them is run."""

_BLOCK_BYTES = 4 << 20

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSummary:
    """What a dataset comes to: counts, and a digest of what all rows say, in order, in whatever container they are.

    Attributes:
        rollouts: Samples of the task that has most of them, those beyond `repeats` included.
        blocks: A digest of every `BLOCK_ROWS` rows, for those who read the rows again.
    """

    rows: int
    tasks: int
    rollouts: int
    trajectories: int
    trajectories_of: dict[str, int]
    digest: str
    blocks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The form in which a run's manifest holds it."""
        return {"rows": self.rows, "trajectories": self.trajectories, "digest": self.digest}


def prompt_groups(
    job: RolloutJob, *, base: Path, environment: EnvironmentSource, blocks: Sequence[str] | None = None
) -> Iterator[PromptGroup]:
    """All prompt groups of a job in order; the same ones in every process that asks.

    Files are read in a thread, some rows ahead: who takes the groups on an event loop does not wait for a network.

    Args:
        base: The manifest's directory.
        environment: Makes an environment by name, where rows are generated.
        blocks: The digests of the rows that the run was checked with; None: whatever is there is taken.

    Raises:
        DatasetError: A row is not usable, or the rows are not those of `blocks`.
    """
    oversample = job.spec.rollout.groups.oversample
    rows: Iterator[Row] = _rows(job, base, environment)
    source = job.spec.dataset.source
    if blocks is not None:
        rows = same_rows(rows, blocks)
    if source.uri is not None or source.huggingface is not None:
        rows = read_ahead(rows, _ROWS_AHEAD)
    return expand(rows, repeats_of(job), oversample=oversample)


def same_rows(rows: Iterable[Row], blocks: Sequence[str]) -> Iterator[Row]:
    """The same rows, each handed on only when its block is known to be what it was when the digests were made.

    Raises:
        DatasetError: Rows were changed, added or taken away since; names them.
    """
    expected = iter(blocks)
    number = 0
    for block in _blocks(rows):
        digest = next(expected, None)
        if digest is None:
            raise _changed(f"it has more than {number} rows by now: {block[0].where} was not there")
        if _digest(block) != digest:
            raise _changed(f"rows {number + 1} to {number + len(block)} ({block[0].where} to {block[-1].where}) differ")
        number += len(block)
        yield from block
    if next(expected, None) is not None:
        raise _changed(f"it has only {number} rows by now")


def _changed(what: str) -> DatasetError:
    return DatasetError(
        f"spec.dataset: the rows are not those that this run was checked with: {what}. Rows that were changed would be "
        "mixed with others under one digest: put back what it was and resume, or start another run with another "
        "--output. Where an environment generates the rows, generate_dataset has to return the same ones each time"
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
        # A row's length keeps two rows from being one.
        digest.update(len(row.content).to_bytes(8, "little") + row.content)
    return digest.hexdigest()


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

    blocks: list[str] = []

    def watched(rows: Iterator[Row]) -> Iterator[Row]:
        for block in _blocks(rows):
            blocks.append(_digest(block))
            for row in block:
                digest.update(row.content)
                yield row

    rows = tasks = rollouts = 0
    counts = {item.name: 0 for item in job.spec.environments}
    oversample = job.spec.rollout.groups.oversample
    for group in expand(watched(_rows(job, base, environment)), repeats_of(job), oversample=oversample):
        rows += 1
        tasks = max(tasks, group.task_index + 1)
        rollouts = max(rollouts, group.rollout_indexes.stop)
        counts[group.row.task_name] += group.keep
    if rows == 0:
        raise DatasetError("spec.dataset: there is not a single row")
    return InputSummary(
        rows=rows,
        tasks=tasks,
        rollouts=rollouts,
        trajectories=sum(counts.values()),
        trajectories_of=counts,
        digest=digest.hexdigest(),
        blocks=tuple(blocks),
    )


def _rows(job: RolloutJob, base: Path, environment: EnvironmentSource) -> Iterator[Row]:
    names = [item.name for item in job.spec.environments]
    return read_rows(job.spec.dataset, base=base, task_names=names, environment=environment)
