"""Dataset rows: where they come from, and what each must hold."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson
from pydantic.alias_generators import to_camel

from kuberoll_api.rolloutjob import Dataset, GeneratorSource, PromptTemplate, Sampling
from kuberoll_workers.environments.interface import EnvironmentInterface

# The seed is the run's: a row may not set it, or the samples of its group would all be one.
_SAMPLING_ALIASES = {to_camel(name): name for name in Sampling.model_fields if name != "seed"}


class DatasetError(ValueError):
    """The dataset cannot be used; the message names the row and says how to mend it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checked row.

    Attributes:
        where: Names the row in errors: `file:line`, or its place in the manifest.
        content: The canonical JSON of the whole row: two rows with the same content are one task.
        messages: The prompt's chat messages, at least one.
        sampling: Overrides of the job's sampling, by snake_case name.
    """

    where: str
    content: bytes
    task_name: str
    messages: list[dict[str, Any]]
    metadata: dict[str, Any] | None
    stop_strings: tuple[str, ...] | None
    sampling: dict[str, Any]
    idx: Any


EnvironmentSource = Callable[[str], EnvironmentInterface]
"""Makes an environment by its name in the job; asked only where an environment generates its own rows."""


def read_rows(
    dataset: Dataset, *, base: Path, task_names: Sequence[str], environment: EnvironmentSource
) -> Iterator[Row]:
    """All rows of a dataset in order, checked, up to its limit; a file is streamed.

    Args:
        base: Where relative paths start: the manifest's directory.
        task_names: The names of the job's environments, in its order.

    Raises:
        DatasetError: The source cannot be read, or a row is not usable.
    """
    for where, row in itertools.islice(_raw_rows(dataset, base, task_names, environment), dataset.limit):
        yield parse_row(row, where=where, task_names=task_names, template=dataset.prompt_template)


def _raw_rows(
    dataset: Dataset, base: Path, task_names: Sequence[str], environment: EnvironmentSource
) -> Iterator[tuple[str, Any]]:
    source = dataset.source
    if source.rows is not None:
        yield from ((f"spec.dataset.source.rows[{number}]", row) for number, row in enumerate(source.rows))
    elif source.uri is not None:
        yield from _file_rows(resolve_path(source.uri, base))
    elif source.generator is not None:
        yield from _generated_rows(source.generator, task_names, environment)
    else:
        given = "configMap" if source.config_map is not None else "pvc"
        raise DatasetError(
            f"spec.dataset.source.{given} can only be read in a cluster; on this machine use source.uri with the file"
        )


def resolve_path(uri: str, base: Path) -> Path:
    """A local path from a path or file:// URI.

    Raises:
        DatasetError: The URI has another scheme.
    """
    scheme, separator, rest = uri.partition("://")
    if separator and scheme != "file":
        raise DatasetError(f"spec.dataset.source.uri: {uri}: only local files can be read, not {scheme}://")
    path = Path(rest if separator else uri).expanduser()
    return path if path.is_absolute() else base / path


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{path}:{number}"
                # A byte-order mark is no part of the JSON; some editors write one.
                text = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
                if not text:
                    continue
                try:
                    row = orjson.loads(text)
                except orjson.JSONDecodeError as error:
                    raise DatasetError(f"{where}: not a JSON object: {error}") from error
                yield where, row
    except OSError as error:
        raise DatasetError(f"spec.dataset.source.uri: {path}: {error.strerror}") from error


def _generated_rows(
    generator: GeneratorSource, task_names: Sequence[str], environment: EnvironmentSource
) -> Iterator[tuple[str, Any]]:
    for name in generator.environments or task_names:
        try:
            rows = environment(name).generate_dataset(generator.count, generator.seed)
        except NotImplementedError as error:
            raise DatasetError(f"spec.dataset.source.generator: environment {name!r}: {error}") from error
        for number, row in enumerate(rows):
            yield f"generated row {number} of environment {name!r}", {"task_name": name, **row}


def parse_row(row: Any, *, where: str, task_names: Sequence[str], template: PromptTemplate | None) -> Row:
    """Check one row.

    A row has its prompt in `messages` (chat messages) or `prompt` (text), or the job has a promptTemplate over the
    row's fields; `task_name` names its environment (not needed when there is one only); `metadata`, `stop_strings`,
    `sampling` and `idx` are optional. Other fields are for the template.

    Raises:
        DatasetError: Names the row and the field.
    """
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: found {_kind(row)}; a row is a JSON object")
    metadata = row.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise DatasetError(f"{where}: metadata: found {_kind(metadata)}; it must be an object")
    return Row(
        where=where,
        content=orjson.dumps(row, option=orjson.OPT_SORT_KEYS),
        task_name=_task_name(row, where, task_names),
        messages=_messages(row, where, template),
        metadata=metadata,
        stop_strings=_stop_strings(row.get("stop_strings"), where),
        sampling=_sampling(row.get("sampling"), where),
        idx=row.get("idx"),
    )


def _task_name(row: Mapping[str, Any], where: str, task_names: Sequence[str]) -> str:
    name = row.get("task_name")
    if name is None and len(task_names) == 1:
        return task_names[0]
    if name is None:
        raise DatasetError(
            f"{where}: task_name is missing; with several environments each row names its own: {', '.join(task_names)}"
        )
    if name not in task_names:
        raise DatasetError(
            f"{where}: task_name: found {name!r}; the job's environments are {', '.join(task_names)}. "
            "Mend the row, or add the environment to spec.environments"
        )
    return str(name)


def _messages(row: Mapping[str, Any], where: str, template: PromptTemplate | None) -> list[dict[str, Any]]:
    messages, prompt = row.get("messages"), row.get("prompt")
    if messages is not None and prompt is not None:
        raise DatasetError(f"{where}: messages and prompt exclude each other: keep one")
    if messages is None and isinstance(prompt, list):
        messages = prompt  # `prompt` as chat messages, as verl's and TRL's datasets have it
    if messages is not None:
        return _checked_messages(messages, where)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if template is None:
        raise DatasetError(f"{where}: there is neither messages nor prompt, and the job has no dataset.promptTemplate")
    texts = [("system", template.system), ("user", template.user)]
    return [{"role": role, "content": _fill(text, row, where)} for role, text in texts if text is not None]


def _checked_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise DatasetError(f"{where}: messages: found {_kind(messages)}; it must be a list of at least one message")
    for number, message in enumerate(messages):
        texts = isinstance(message, dict) and [message.get("role"), message.get("content")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DatasetError(f"{where}: messages[{number}]: a message is an object with a role and a content, texts")
    return messages


def _fill(text: str, row: Mapping[str, Any], where: str) -> str:
    try:
        return string.Formatter().vformat(text, (), row)
    except KeyError as error:
        raise DatasetError(
            f"{where}: the job's promptTemplate uses {{{error.args[0]}}}, which this row does not have; "
            "write {{ and }} for braces"
        ) from error
    except (ValueError, IndexError, AttributeError) as error:
        raise DatasetError(f"{where}: the job's promptTemplate cannot be filled: {error}") from error


def _stop_strings(value: Any, where: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(stop, str) and stop for stop in value):
        raise DatasetError(f"{where}: stop_strings: found {_kind(value)}; it must be a list of texts")
    return tuple(value)


def _sampling(value: Any, where: str) -> dict[str, Any]:
    """A row's sampling overrides; keys in the manifest's camelCase or in vLLM's snake_case."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DatasetError(f"{where}: sampling: found {_kind(value)}; it must be an object")
    named: dict[str, Any] = {_SAMPLING_ALIASES.get(key) or key: setting for key, setting in value.items()}
    unknown = sorted(set(named) - set(_SAMPLING_ALIASES.values()))
    if unknown:
        allowed = ", ".join(sorted(_SAMPLING_ALIASES))
        raise DatasetError(f"{where}: sampling.{unknown[0]}: unknown; a row may set {allowed}")
    try:
        Sampling.model_validate({to_camel(name): setting for name, setting in named.items()})
    except ValueError as error:
        raise DatasetError(f"{where}: sampling: {error}") from error
    return named


def _kind(value: Any) -> str:
    text = msgspec.json.encode(value).decode() if isinstance(value, (str, int, float)) else ""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return f"{names.get(type(value), 'nothing')} {text[:60]}".strip()
