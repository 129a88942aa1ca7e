"""Numbers of all trajectories in columns: about 100 bytes per trajectory, whatever its length."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kuberoll_workers.analysis.statistics import Floats, Integers
from kuberoll_workers.data.record import RecordError, TrajectoryKey, TrajectoryRecord

REWARD = "total_reward"
TURNS = "turn_count"
TOKENS = ("tokens.prompt", "tokens.generated", "tokens.environment")
TOTAL_TOKENS = "tokens.total"
SECONDS = ("timing.generation_seconds", "timing.environment_seconds")
PARTS = "reward_parts."
METADATA = "metadata."


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Values of one field: `values[i]` belongs to trajectory `rows[i]` of its frame; `rows` is ascending."""

    rows: Integers
    values: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Trajectories of one environment, each once, sorted by task and rollout index.

    Attributes:
        ordinals: Position of each in the order in which they were added to the table.
        tasks, rollouts: `task_index` and `rollout_index`.
        answers: Equal numbers are equal answers; 0 for no answer.
        stop_reasons: Index of each into `Table.stop_reasons`.
        columns: All numeric fields, by name.
    """

    ordinals: Integers
    tasks: Integers
    rollouts: Integers
    answers: Integers
    stop_reasons: Integers
    columns: Mapping[str, Column]


class Table:
    """Collects trajectories, each once and in any order, and splits them by environment."""

    def __init__(self) -> None:
        self.environments: list[str] = []
        self.stop_reasons: list[str] = []
        self._tasks, self._rollouts = array("q"), array("q")
        self._environment, self._stop_reason = array("H"), array("B")
        self._answers = array("q")
        self._dense = {name: array("d") for name in (REWARD, TURNS, *TOKENS, *SECONDS)}
        self._sparse: dict[tuple[int, str], tuple[array[int], array[float]]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, record: TrajectoryRecord) -> None:
        """Add the numbers of one trajectory."""
        row = len(self)
        self._tasks.append(record.task_index)
        self._rollouts.append(record.rollout_index)
        environment = _number(self.environments, record.task_name)
        self._environment.append(environment)
        self._stop_reason.append(_number(self.stop_reasons, record.stop_reason))
        self._answers.append(_answer(record.answer))
        tokens, timing = record.tokens, record.timing
        values: tuple[float, ...] = (
            record.total_reward,
            record.turn_count,
            tokens.prompt,
            tokens.generated,
            tokens.environment,
            math.fsum(timing.generation_seconds),
            math.fsum(timing.environment_seconds),
        )
        for column, value in zip(self._dense.values(), values, strict=True):
            column.append(_float(value))
        for name, by_turn in record.reward_parts.items():
            self._add(environment, PARTS + name, row, _sum(by_turn))
        for name, value in (record.metadata or {}).items():
            if isinstance(value, bool | int | float):
                self._add(environment, METADATA + name, row, _float(value))

    def _add(self, environment: int, name: str, row: int, value: float) -> None:
        rows, values = self._sparse.setdefault((environment, name), (array("q"), array("d")))
        rows.append(row)
        values.append(value)

    def frames(self) -> dict[str, Frame]:
        """Trajectories by environment.

        Raises:
            RecordError: Two environments have trajectories of the same task.
        """
        order: Integers = np.lexsort((_integers(self._rollouts), _integers(self._tasks)))
        environment = np.frombuffer(self._environment, dtype=np.uint16)[order]
        self._check_tasks(_integers(self._tasks)[order], environment)
        return {
            name: self._frame(number, order[environment == number]) for number, name in enumerate(self.environments)
        }

    def _frame(self, environment: int, ordinals: Integers) -> Frame:
        rows = np.arange(len(ordinals))
        place = np.full(len(self), -1, dtype=np.int64)
        place[ordinals] = rows
        columns: dict[str, Column] = {}
        for name, values in self._dense.items():
            columns[name] = Column(rows=rows, values=np.frombuffer(values, dtype=np.float64)[ordinals])
            if name == TOKENS[-1]:
                total = sum((columns[part].values for part in TOKENS), start=np.zeros(len(rows)))
                columns[TOTAL_TOKENS] = Column(rows=rows, values=total)
        for (of, name), (sparse_rows, sparse_values) in sorted(self._sparse.items(), key=lambda item: item[0]):
            if of == environment:
                found = place[_integers(sparse_rows)]
                order = np.argsort(found, kind="stable")
                order = order[found[order] >= 0]
                present = np.frombuffer(sparse_values, dtype=np.float64)[order]
                columns[name] = Column(rows=found[order], values=present)
        return Frame(
            ordinals=ordinals,
            tasks=_integers(self._tasks)[ordinals],
            rollouts=_integers(self._rollouts)[ordinals],
            answers=_integers(self._answers)[ordinals],
            stop_reasons=np.frombuffer(self._stop_reason, dtype=np.uint8)[ordinals].astype(np.int64),
            columns=columns,
        )

    def _check_tasks(self, tasks: Integers, environment: Any) -> None:
        mixed = np.flatnonzero((np.diff(tasks) == 0) & (environment[1:] != environment[:-1]))
        if mixed.size:
            first = int(mixed[0])
            names = [self.environments[environment[row]] for row in (first, first + 1)]
            raise several_environments(int(tasks[first]), names)

    def key(self, ordinal: int) -> TrajectoryKey:
        """Key of the `ordinal`-th trajectory that was added, from 0."""
        return TrajectoryKey(self._tasks[ordinal], self._rollouts[ordinal])


def several_environments(task: int, names: Collection[str]) -> RecordError:
    """Error of a task whose trajectories belong to several environments."""
    return RecordError(
        f"task {task} has trajectories of the environments {' and '.join(map(repr, sorted(names)))}: "
        "these are trajectories of several runs; aggregate each run by itself"
    )


def _number(names: list[str], name: str) -> int:
    # There are only a handful of names.
    try:
        return names.index(name)
    except ValueError:
        names.append(name)
        return len(names) - 1


def _answer(answer: str | None) -> int:
    if answer is None:
        return 0
    digest = hashlib.blake2b(answer.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) or 1


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def _integers(values: array[int]) -> Integers:
    return np.frombuffer(values, dtype=np.int64)
