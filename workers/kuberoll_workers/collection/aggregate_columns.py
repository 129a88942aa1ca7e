"""The batch that an environment's own metrics are made of: columns that are read only when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from kuberoll_workers.collection.aggregate_sources import Contents
from kuberoll_workers.collection.aggregate_table import REWARD, TURNS, Frame
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.environments.interface import EnvironmentInterface

MakeEnvironment = Callable[[str], EnvironmentInterface]


def _chat(record: TrajectoryRecord) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in record.messages]


# What is in the records alone: reading it takes another pass over the files, and the memory of what is read.
_STORED: Mapping[str, Callable[[TrajectoryRecord], Any]] = {
    "message_log": _chat,
    "extra_env_info": lambda record: record.metadata,
    "idx": lambda record: record.idx,
    "answer": lambda record: record.answer,
}
_AT_HAND: Mapping[str, Callable[[str, Contents, Frame], list[Any]]] = {
    "task_name": lambda name, _, frame: [name] * len(frame.tasks),
    "task_index": lambda _, __, frame: frame.tasks.tolist(),
    "rollout_index": lambda _, __, frame: frame.rollouts.tolist(),
    "total_reward": lambda _, __, frame: frame.columns[REWARD].values.tolist(),
    "stop_reason": lambda _, contents, frame: [contents.stop_reasons[reason] for reason in frame.stop_reasons],
    "turn_count": lambda _, __, frame: frame.columns[TURNS].values.astype(np.int64).tolist(),
}


class _Reader:
    """Reads a column for all environments at once, so that several of them do not read the files several times."""

    def __init__(self, contents: Contents, environments: list[str]) -> None:
        self.contents = contents
        self._environments = environments
        self._read: dict[str, dict[str, list[Any]]] = {}

    def take(self, column: str, environment: str) -> list[Any]:
        """A column of an environment; it is handed over, not kept."""
        if environment not in self._read.setdefault(column, {}):
            self._read[column] = self._pass(column)
        return self._read[column].pop(environment)

    def done(self, environment: str) -> None:
        """Forget what the environment did not take."""
        self._environments.remove(environment)
        for lots in self._read.values():
            lots.pop(environment, None)

    def _pass(self, column: str) -> dict[str, list[Any]]:
        frames = {name: self.contents.frames[name] for name in self._environments}
        found: dict[str, list[Any]] = {name: [None] * len(frame.tasks) for name, frame in frames.items()}
        total = sum(len(frame.tasks) for frame in self.contents.frames.values()) + self.contents.duplicates
        places = {name: np.full(total, -1, dtype=np.int64) for name in frames}
        for name, frame in frames.items():
            places[name][frame.ordinals] = np.arange(len(frame.ordinals))
        read = _STORED[column]
        for ordinal, record in self.contents.again():
            if record.task_name in found and (place := places[record.task_name][ordinal]) >= 0:
                found[record.task_name][place] = read(record)
        return found


class Columns(MutableMapping[str, Any]):
    """A mapping of columns, one entry per finished trajectory, by task and rollout index; columns may be set."""

    def __init__(self, reader: _Reader, environment: str) -> None:
        self._reader = reader
        self._environment = environment
        self._columns: dict[str, Any] = dict.fromkeys([*_STORED, *_AT_HAND])
        self._unread = set(self._columns)

    def __getitem__(self, name: str) -> Any:
        if name in self._unread:
            contents = self._reader.contents
            if name in _STORED:
                column = self._reader.take(name, self._environment)
            else:
                column = _AT_HAND[name](self._environment, contents, contents.frames[self._environment])
            self._columns[name] = column
            self._unread.discard(name)
        return self._columns[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._columns[name] = value
        self._unread.discard(name)

    def __delitem__(self, name: str) -> None:
        del self._columns[name]
        self._unread.discard(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def own_metrics(contents: Contents, make: MakeEnvironment) -> dict[str, dict[str, Any]]:
    """What environments say of their trajectories; where their code fails, `error` says how, and nothing else is lost.

    Returns:
        Only environments with trajectories and with a `global_post_process_and_metrics` of their own.
    """
    found: dict[str, dict[str, Any]] = {}
    made: dict[str, EnvironmentInterface] = {}
    for name in contents.frames:
        try:
            environment = make(name)
        except Exception as error:
            found[name] = {"error": f"the environment could not be made: {type(error).__name__}: {error}"}
            continue
        method = getattr(type(environment), "global_post_process_and_metrics", None)
        if method is not EnvironmentInterface.global_post_process_and_metrics:
            made[name] = environment
    reader = _Reader(contents, list(made))
    for name, environment in made.items():
        try:
            found[name] = dict(environment.global_post_process_and_metrics(Columns(reader, name))[1])
        except Exception as error:
            found[name] = {"error": f"global_post_process_and_metrics raised {type(error).__name__}: {error}"}
        reader.done(name)
    return found
