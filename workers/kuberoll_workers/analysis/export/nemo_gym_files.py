"""NeMo Gym's files of a run: rollouts, materialized inputs, failures, and aggregate metrics."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import orjson

from kuberoll_workers.analysis.export import nemo_gym
from kuberoll_workers.analysis.export.formats import ExportError
from kuberoll_workers.analysis.export.nemo_gym_metrics import GymMetrics
from kuberoll_workers.analysis.export.writers import json_line, new_files
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.dataset.expansion import PromptGroup
from kuberoll_workers.dataset.gym_rows import row_of_dataset, task_number
from kuberoll_workers.dataset.rows import Row
from kuberoll_workers.dataset.task_file import TaskFile


@dataclass(frozen=True, slots=True)
class GymFiles:
    """Names of the files that belong to a file of rollouts, as Gym derives them.

    Attributes:
        rollouts: One line for each finished rollout.
        inputs: The inputs of these, and of those that failed.
        failures: One line for each that failed.
        metrics: Aggregate metrics.
    """

    rollouts: Path
    inputs: Path
    failures: Path
    metrics: Path

    @classmethod
    def beside(cls, rollouts: Path) -> GymFiles:
        """The files of a file of rollouts."""
        stem = rollouts.stem
        return cls(
            rollouts=rollouts,
            inputs=rollouts.with_name(f"{stem}_materialized_inputs.jsonl"),
            failures=rollouts.with_name(f"{stem}_failures.jsonl"),
            metrics=rollouts.with_name(f"{stem}_aggregate_metrics.json"),
        )

    @property
    def all(self) -> tuple[Path, ...]:
        """All of them; that of the rollouts is the last."""
        return self.inputs, self.failures, self.metrics, self.rollouts


class TaskRows:
    """Rows of a dataset's tasks, on disk: 16 bytes of memory per task."""

    def __init__(self, file: IO[bytes], groups: Iterable[PromptGroup]) -> None:
        """Read the dataset once.

        Args:
            file: Exclusive file for the rows.

        Raises:
            DatasetError: A row is invalid.
        """
        numbers: array[int] = array("q")

        def encode(row: Row) -> bytes:
            number = task_number(row)
            numbers.extend([] if number is None else [number])
            return orjson.dumps(row_of_dataset(row))

        self._rows = TaskFile(file, groups, encode)
        # Numbers that only some tasks have could be those of others.
        own = len(numbers) == len(self._rows) == len(set(numbers))
        self._numbers = numbers if own else None

    def of(self, record: TrajectoryRecord | FailureRecord) -> tuple[dict[str, Any], int | None]:
        """Row of a trajectory's task, and Gym's number of it, if all tasks have one.

        Raises:
            ExportError: The dataset has no such task.
        """
        task = record.task_index
        row = self._rows.find(task)
        if row is None:
            raise ExportError(f"--manifest: the dataset has {len(self._rows)} tasks, and the run a task {task}")
        return orjson.loads(row), None if self._numbers is None else self._numbers[task]


def write_gym_files(
    rollouts: Path,
    finished: Iterable[TrajectoryRecord],
    failed: Iterable[FailureRecord],
    *,
    rows: TaskRows | None,
    model: str,
    force: bool,
) -> bool:
    """Write the files of a run; they get their names together, when all are complete.

    Args:
        rollouts: The file of rollouts; the others are beside it.
        rows: Rows of the dataset; None to make them from the trajectories.
        model: Name of the policy.
        force: Overwrite existing files.

    Returns:
        True if there was a finished rollout; otherwise nothing is written.

    Raises:
        ExportError: A file exists already or cannot be written, or a task is not in the dataset.
    """

    def given(record: TrajectoryRecord | FailureRecord) -> dict[str, Any]:
        row, number = (nemo_gym.row_of_record(record), None) if rows is None else rows.of(record)
        return nemo_gym.materialized(record, row, number=number)

    records = iter(finished)
    first = next(records, None)
    if first is None:
        return False
    metrics = GymMetrics()
    files = GymFiles.beside(rollouts)
    with new_files(files.all, force=force) as made:
        for record in chain([first], records):
            row = given(record)
            result = nemo_gym.rollout(record, row, model=model)
            metrics.add(result)
            made[files.inputs].write(json_line(row))
            made[files.rollouts].write(json_line(result))
        for failure in failed:
            row = given(failure)
            made[files.inputs].write(json_line(row))
            made[files.failures].write(json_line(nemo_gym.failure(failure, row, model=model)))
        made[files.metrics].write(orjson.dumps(metrics.entries(), option=orjson.OPT_INDENT_2))
    return True
