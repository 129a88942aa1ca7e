"""Reading of a job's dataset: from its source to validated rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kuberoll_api.model.dataset import Dataset, DatasetPart, DatasetSource, GeneratorSource, PromptTemplate
from kuberoll_api.paths import Path as ManifestPath
from kuberoll_api.paths import format_path
from kuberoll_workers.data.plain import message_of
from kuberoll_workers.data.tracebacks import traceback_of
from kuberoll_workers.dataset.columns import ColumnMap
from kuberoll_workers.dataset.forms import completed, uri_rows
from kuberoll_workers.dataset.order import NumberedRow, derived_seed, mixed, shuffled
from kuberoll_workers.dataset.rows import DatasetError, Row, RowPosition, parse_row, row_of_source
from kuberoll_workers.dataset.sources import RawRow, checked_integers, hub_rows, json_row
from kuberoll_workers.environments.interface import EnvironmentInterface
from kuberoll_workers.environments.outcome import EnvironmentFault
from kuberoll_workers.environments.registry import UnusableEnvironment

__all__ = ["DatasetError", "EnvironmentSource", "Row", "RowPosition", "accepted", "parse_row", "read_rows"]

_Found = TypeVar("_Found")

EnvironmentSource = Callable[[str], EnvironmentInterface]
"""Creates an environment by its name in the job; called only if an environment generates rows."""


def read_rows(
    dataset: Dataset,
    *,
    base: Path,
    task_names: Sequence[str],
    environment: EnvironmentSource,
    refused: Callable[[DatasetError], None] | None = None,
    gym_agents: Collection[str] = (),
    types: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """All rows of a dataset in the job's order, validated, up to its limit; files are streamed.

    Args:
        base: Directory of relative paths: the manifest's.
        task_names: Names of the job's environments, in their order.
        refused: Called with the error of each invalid row, which is then left out; None to raise it.
        gym_agents: As in `parse_row`.
        types: Type of each environment that has one, by name.

    Raises:
        DatasetError: The source cannot be read, or a row is invalid.
    """
    readers = _readers(dataset, base, task_names, environment, gym_agents, types or {})
    numbered = itertools.islice(_ordered(dataset, readers), dataset.limit)
    yield from accepted(numbered, lambda found: readers[found.part].parse(found), refused)


def accepted(
    found: Iterable[_Found], read: Callable[[_Found], Row], refused: Callable[[DatasetError], None] | None
) -> Iterator[Row]:
    """The rows that are made of what was found.

    Args:
        refused: Called with the error of each that cannot be, which is then left out; None to raise it.

    Raises:
        DatasetError: One cannot be.
    """
    for one in found:
        try:
            row = read(one)
        except DatasetError as error:
            if refused is None:
                raise
            refused(error)
        else:
            yield row


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """One source of rows, and how they are read.

    Attributes:
        part: Its settings, if it is one of several.
        unreadable: Errors of rows that cannot be read, by their numbers; grows while `rows` is read.
    """

    rows: Iterator[NumberedRow]
    task_names: Sequence[str]
    columns: ColumnMap
    template: PromptTemplate | None
    part: DatasetPart | None
    gym_agents: Collection[str]
    unreadable: Mapping[int, DatasetError]

    def parse(self, numbered: NumberedRow) -> Row:
        """Validate a row.

        Raises:
            DatasetError: It is invalid.
        """
        if (error := self.unreadable.get(numbered.number)) is not None:
            raise error
        row = parse_row(
            numbered.row,
            place=numbered.place,
            task_names=self.task_names,
            template=self.template,
            columns=self.columns,
            default_task=None if self.part is None else self.part.environment,
            gym_agents=self.gym_agents,
        )
        return row if self.part is None else row_of_source(row, self.part.name, numbered.number)


def _readers(
    dataset: Dataset,
    base: Path,
    task_names: Sequence[str],
    environment: EnvironmentSource,
    gym_agents: Collection[str],
    types: Mapping[str, str],
) -> list[_Reader]:
    located = dataset.located_sources()
    unreadable: list[dict[int, DatasetError]] = [{} for _ in located]

    def rows(index: int, source: DatasetSource, path: ManifestPath) -> Iterator[NumberedRow]:
        part = dataset.sources[index] if dataset.sources else None
        names = [part.environment] if part is not None and part.environment is not None else task_names
        raw = completed(_raw_rows(source, format_path(path), base, task_names, environment, types), base, types, names)
        for number, (place, row) in enumerate(raw):
            if isinstance(row, DatasetError):
                # An error is no JSON, as which rows are shuffled.
                unreadable[index][number], row = row, None
            yield NumberedRow(index, number, place, row)

    if not dataset.sources:
        [(path, source)] = located
        return [
            _Reader(
                rows=rows(0, source, path),
                task_names=task_names,
                columns=ColumnMap(dataset.columns),
                template=dataset.prompt_template,
                part=None,
                gym_agents=gym_agents,
                unreadable=unreadable[0],
            )
        ]
    return [
        _Reader(
            rows=rows(index, source, path),
            task_names=task_names,
            columns=ColumnMap(part.columns),
            template=part.prompt_template,
            part=part,
            gym_agents=gym_agents,
            unreadable=unreadable[index],
        )
        for index, (part, (path, source)) in enumerate(zip(dataset.sources, located, strict=True))
    ]


def _ordered(dataset: Dataset, readers: Sequence[_Reader]) -> Iterator[NumberedRow]:
    """Rows of all sources, shuffled and mixed.

    With weights every source is shuffled, and the shares hold in every part of the run; without, all rows are shuffled
    together.
    """
    seed, weights = dataset.shuffle_seed, [part.weight for part in dataset.sources if part.weight is not None]
    streams = [_limited(reader, seed, always=bool(weights)) for reader in readers]
    if weights:
        return mixed(streams, weights)
    rows = itertools.chain.from_iterable(streams)
    return rows if seed is None else shuffled(rows, seed)


def _limited(reader: _Reader, seed: int | None, *, always: bool) -> Iterator[NumberedRow]:
    """Rows of one source up to its limit, shuffled if the order of all rows does not make that superfluous."""
    part, rows = reader.part, reader.rows
    if part is None:
        return rows
    rows = _not_empty(rows, part.name)
    if seed is not None and (always or part.limit is not None):
        rows = shuffled(rows, derived_seed(seed, part.name))
    return itertools.islice(rows, part.limit)


def _not_empty(rows: Iterator[NumberedRow], name: str) -> Iterator[NumberedRow]:
    first = next(rows, None)
    if first is None:
        raise DatasetError(f"spec.dataset.sources: {name}: there are no rows")
    yield first
    yield from rows


def _raw_rows(
    source: DatasetSource,
    field: str,
    base: Path,
    task_names: Sequence[str],
    environment: EnvironmentSource,
    types: Mapping[str, str],
) -> Iterator[RawRow]:
    if source.rows is not None:
        places = (RowPosition(f"{field}.rows[", number, "]") for number in range(len(source.rows)))
        return ((place, checked_integers(row, place)) for place, row in zip(places, source.rows, strict=True))
    if source.uri is not None:
        return uri_rows(source.uri, base, field, types)
    if source.huggingface is not None:
        return hub_rows(source.huggingface, base, field)
    if source.generator is not None:
        return _generated_rows(source.generator, field, task_names, environment)
    given = "configMap" if source.config_map is not None else "pvc"
    raise DatasetError(
        f"{field}.{given} can only be read in a cluster; on this machine name a file beside the manifest: "
        f"--set {field}='{{uri: rows.jsonl}}'"
    )


def _generated_rows(
    generator: GeneratorSource, field: str, task_names: Sequence[str], environment: EnvironmentSource
) -> Iterator[RawRow]:
    for name in generator.environments or task_names:
        makes = getattr(environment(name), "generate_dataset", None)
        if makes is None:
            raise DatasetError(
                f"{field}.generator: environment {name!r} has no generate_dataset; use source.uri or rows"
            )
        try:
            for number, row in enumerate(makes(generator.count, generator.seed)):
                place = RowPosition("generated row ", number, f" of environment {name!r}")
                given = json_row(row, place)
                yield place, {"task_name": name, **given} if isinstance(given, dict) else given
        except (DatasetError, UnusableEnvironment):
            raise
        except NotImplementedError as error:
            raise DatasetError(f"{field}.generator: environment {name!r}: {error}") from error
        except EnvironmentFault as fault:
            raise DatasetError(f"{field}.generator: environment {name!r}: {fault}", fault.traceback) from fault
        except SystemExit as error:
            raise DatasetError(
                f"{field}.generator: environment {name!r}: generate_dataset called sys.exit({error.code!r})",
                traceback_of(error),
            ) from error
        except Exception as error:
            # The environment is the user's code, so every exception concerns its rows.
            raise DatasetError(
                f"{field}.generator: environment {name!r}: generate_dataset raised {type(error).__name__}: "
                f"{message_of(error)}",
                traceback_of(error),
            ) from error
