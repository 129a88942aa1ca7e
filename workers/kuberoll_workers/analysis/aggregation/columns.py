"""The batch for an environment's own metrics: columns that are loaded on access."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import orjson

from kuberoll_workers.analysis.aggregation.environments import MetricsFailure
from kuberoll_workers.analysis.aggregation.sources import Contents
from kuberoll_workers.analysis.aggregation.table import REWARD, TOKENS, TOTAL_TOKENS, TURNS, Frame
from kuberoll_workers.data.messages import chat_message
from kuberoll_workers.data.plain import message_of
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.stop_reasons import by_environment
from kuberoll_workers.data.tracebacks import attached_traceback, traceback_of
from kuberoll_workers.environments.interface import EnvironmentInterface
from kuberoll_workers.environments.ray_classes import is_ray_class

MakeEnvironment = Callable[[str], EnvironmentInterface]


HOOK_SECONDS = 900.0
"""Time limit of `global_post_process_and_metrics` for one environment."""

PROMPT_IDS = "prompt_token_ids"
"""Name of the column with the token ids of each prompt."""
PROMPT_TOKENS, ALL_TOKENS = "prompt_tokens", "total_tokens"
"""Names of the columns with the numbers of tokens of the prompt, and of the whole trajectory."""

_HOOK = "global_post_process_and_metrics"


def _chat(record: TrajectoryRecord) -> list[dict[str, Any]]:
    return [chat_message(message) for message in record.messages]


def _prompt_length(record: TrajectoryRecord) -> int:
    return sum(message.turn == 0 for message in record.messages)


# Columns that exist only in the records: loading one takes another pass over the files, and memory.
_STORED: Mapping[str, Callable[[TrajectoryRecord], Any]] = {
    "message_log": _chat,
    "extra_env_info": lambda record: record.metadata,
    "idx": lambda record: record.idx,
    PROMPT_IDS: lambda record: record.messages[_prompt_length(record) - 1].token_ids,
    "answer": lambda record: record.answer,
}
_COMPUTED: Mapping[str, Callable[[str, Contents, Frame], list[Any]]] = {
    "task_name": lambda name, _, frame: [name] * len(frame.tasks),
    "task_index": lambda _, __, frame: frame.tasks.tolist(),
    "rollout_index": lambda _, __, frame: frame.rollouts.tolist(),
    "total_reward": lambda _, __, frame: frame.columns[REWARD].values.tolist(),
    "stop_reason": lambda _, contents, frame: [contents.stop_reasons[reason] for reason in frame.stop_reasons],
    "turn_count": lambda _, __, frame: frame.columns[TURNS].values.astype(np.int64).tolist(),
    PROMPT_TOKENS: lambda _, __, frame: frame.columns[TOKENS[0]].values.astype(np.int64).tolist(),
    ALL_TOKENS: lambda _, __, frame: frame.columns[TOTAL_TOKENS].values.astype(np.int64).tolist(),
}


class _Reader:
    """Loads a column for all environments at once, which saves passes over the files."""

    def __init__(self, contents: Contents, environments: list[str]) -> None:
        self.contents = contents
        self._environments = environments
        self._read: dict[str, dict[str, list[Any]]] = {}

    def take(self, column: str, environment: str) -> list[Any]:
        """A column of an environment; ownership passes to the caller."""
        if environment not in self._read.setdefault(column, {}):
            self._read[column] = self._pass(column)
        return self._read[column].pop(environment)

    def done(self, environment: str) -> None:
        """Release the columns that the environment did not take."""
        self._environments.remove(environment)
        for lots in self._read.values():
            lots.pop(environment, None)

    def _pass(self, column: str) -> dict[str, list[Any]]:
        frames = {name: self.contents.frames[name] for name in self._environments}
        found: dict[str, list[Any]] = {name: [None] * len(frame.tasks) for name, frame in frames.items()}
        total = sum(len(frame.tasks) for frame in self.contents.frames.values())
        places = {name: np.full(total, -1, dtype=np.int64) for name in frames}
        for name, frame in frames.items():
            places[name][frame.ordinals] = np.arange(len(frame.ordinals))
        read = _STORED[column]
        for ordinal, record in self.contents.reread():
            if record.task_name in found and (place := places[record.task_name][ordinal]) >= 0:
                found[record.task_name][place] = read(record)
        return found


class Columns(MutableMapping[str, Any]):
    """Mutable mapping of columns, with one entry per finished trajectory, by task and rollout index."""

    def __init__(self, reader: _Reader, environment: str) -> None:
        self._reader = reader
        self._environment = environment
        self._columns: dict[str, Any] = dict.fromkeys([*_STORED, *_COMPUTED])
        self._unread = set(self._columns)

    def __getitem__(self, name: str) -> Any:
        if name in self._unread:
            contents = self._reader.contents
            if name in _STORED:
                column = self._reader.take(name, self._environment)
            else:
                column = _COMPUTED[name](self._environment, contents, contents.frames[self._environment])
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


class TensorColumns(Columns):
    """The batch as NeMo RL's own environments expect it: further columns, and numbers as tensors of PyTorch.

    Source: `BaseMathEnvironment.global_post_process_and_metrics` and the rollouts of NeMo RL, which fill it.
    """

    def __init__(self, reader: _Reader, environment: str) -> None:
        super().__init__(reader, environment)
        self._numbers = Columns(reader, environment)
        self._columns |= dict.fromkeys(_TENSORS)
        self._unread |= _TENSORS.keys()

    def __getitem__(self, name: str) -> Any:
        if name in self._unread and name in _TENSORS:
            self[name] = _TENSORS[name](self._numbers)
        return super().__getitem__(name)


def _tensor(values: list[Any], dtype: str) -> Any:
    import torch

    return torch.tensor(values, dtype=getattr(torch, dtype))


def _prompts(columns: Columns) -> Any:
    import torch

    rows = [torch.tensor(list(ids), dtype=torch.int64) for ids in columns[PROMPT_IDS]]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


_TENSORS: Mapping[str, Callable[[Columns], Any]] = {
    "rewards": lambda columns: _tensor(columns["total_reward"], "float32"),
    "total_reward": lambda columns: _tensor(columns["total_reward"], "float32"),
    "is_end": lambda columns: _tensor([by_environment(reason) for reason in columns["stop_reason"]], "float32"),
    "generation_lengths": lambda columns: _tensor(columns[ALL_TOKENS], "int64"),
    "prompt_lengths": lambda columns: _tensor(columns[PROMPT_TOKENS], "int64"),
    "text": _prompts,
}


def own_metrics(
    contents: Contents, make: MakeEnvironment, *, seconds: float = HOOK_SECONDS
) -> dict[str, dict[str, Any] | MetricsFailure]:
    """Environments' own metrics. A failure of their code takes the place of their metrics and affects nothing else.

    Args:
        seconds: Time limit of one environment's code.

    Returns:
        Metrics of environments that have trajectories and implement `global_post_process_and_metrics`.
    """
    found: dict[str, dict[str, Any] | MetricsFailure] = {}
    made: dict[str, EnvironmentInterface] = {}
    for name in contents.frames:
        try:
            environment = make(name)
        except (Exception, SystemExit) as error:
            found[name] = MetricsFailure(
                error=f"the environment could not be created: {type(error).__name__}: {message_of(error)}",
                traceback=attached_traceback(error) or traceback_of(error),
            )
            continue
        method = getattr(type(environment), "global_post_process_and_metrics", None)
        if method is not EnvironmentInterface.global_post_process_and_metrics:
            made[name] = environment
    reader = _Reader(contents, list(made))
    for name, environment in made.items():
        columns = TensorColumns if is_ray_class(type(environment)) else Columns
        found[name] = _hook_metrics(environment, columns(reader, name), seconds)
        reader.done(name)
    return found


def _hook_metrics(
    environment: EnvironmentInterface, columns: Columns, seconds: float
) -> dict[str, Any] | MetricsFailure:
    """Metrics of one environment; its code runs in a separate thread, which can neither end nor block the run."""
    metrics: dict[str, Any] = {}
    failures: list[MetricsFailure] = []

    def ask() -> None:
        try:
            metrics.update(environment.global_post_process_and_metrics(columns)[1])
        except SystemExit as error:
            text = f"{_HOOK} called sys.exit({error.code!r})"
            failures.append(MetricsFailure(error=text, traceback=traceback_of(error)))
        except BaseException as error:
            text = f"{_HOOK} raised {type(error).__name__}: {message_of(error)}"
            failures.append(MetricsFailure(error=text, traceback=traceback_of(error)))

    thread = threading.Thread(target=ask, name="kuberoll-metrics", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return MetricsFailure(error=f"{_HOOK} took longer than {seconds:g} s and was abandoned")
    if failures:
        return failures[0]
    return dict(map(_json_metric, metrics.items()))


def _json_metric(item: tuple[Any, Any]) -> tuple[str, Any]:
    """A metric in a form that JSON can represent."""
    key, value = item
    name = key if isinstance(key, str) else str(key)
    try:
        name.encode()
        orjson.dumps(value, default=plain_metric, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except (TypeError, ValueError, RecursionError) as error:
        return ascii(name)[1:-1] if not name.isprintable() else name, f"JSON cannot represent it: {error}"
    return name, value


def plain_metric(value: Any) -> Any:
    """A metric of any library for JSON: tensors as numbers or lists, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
