"""Reading of a job's dataset: from its source to validated rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kuberoll_api.model.dataset import Dataset, GeneratorSource
from kuberoll_workers.data.plain import message_of
from kuberoll_workers.data.tracebacks import traceback_of
from kuberoll_workers.dataset.rows import DatasetError, Row, RowPosition, parse_row
from kuberoll_workers.dataset.sources import FIELD, RawRow, checked_integers, file_rows, hub_rows, json_row
from kuberoll_workers.environments.interface import EnvironmentInterface
from kuberoll_workers.environments.outcome import EnvironmentFault

__all__ = ["DatasetError", "EnvironmentSource", "Row", "RowPosition", "parse_row", "read_rows"]

EnvironmentSource = Callable[[str], EnvironmentInterface]
"""Creates an environment by its name in the job; called only if an environment generates rows."""


def read_rows(
    dataset: Dataset, *, base: Path, task_names: Sequence[str], environment: EnvironmentSource
) -> Iterator[Row]:
    """All rows of a dataset in order, validated, up to its limit; files are streamed.

    Args:
        base: Directory of relative paths: the manifest's.
        task_names: Names of the job's environments, in their order.

    Raises:
        DatasetError: The source cannot be read, or a row is invalid.
    """
    for place, row in itertools.islice(_raw_rows(dataset, base, task_names, environment), dataset.limit):
        yield parse_row(row, place=place, task_names=task_names, template=dataset.prompt_template)


def _raw_rows(
    dataset: Dataset, base: Path, task_names: Sequence[str], environment: EnvironmentSource
) -> Iterator[RawRow]:
    source = dataset.source
    if source.rows is not None:
        places = (RowPosition(f"{FIELD}.rows[", number, "]") for number in range(len(source.rows)))
        return ((place, checked_integers(row, place)) for place, row in zip(places, source.rows, strict=True))
    if source.uri is not None:
        return file_rows(source.uri, base)
    if source.huggingface is not None:
        return hub_rows(source.huggingface, base)
    if source.generator is not None:
        return _generated_rows(source.generator, task_names, environment)
    given = "configMap" if source.config_map is not None else "pvc"
    raise DatasetError(
        f"{FIELD}.{given} can only be read in a cluster; on this machine name a file beside the manifest: "
        f"--set {FIELD}='{{uri: rows.jsonl}}'"
    )


def _generated_rows(
    generator: GeneratorSource, task_names: Sequence[str], environment: EnvironmentSource
) -> Iterator[RawRow]:
    for name in generator.environments or task_names:
        makes = getattr(environment(name), "generate_dataset", None)
        if makes is None:
            raise DatasetError(
                f"{FIELD}.generator: environment {name!r} has no generate_dataset; use source.uri or rows"
            )
        try:
            for number, row in enumerate(makes(generator.count, generator.seed)):
                place = RowPosition("generated row ", number, f" of environment {name!r}")
                given = json_row(row, place)
                yield place, {"task_name": name, **given} if isinstance(given, dict) else given
        except DatasetError:
            raise
        except NotImplementedError as error:
            raise DatasetError(f"{FIELD}.generator: environment {name!r}: {error}") from error
        except EnvironmentFault as fault:
            raise DatasetError(f"{FIELD}.generator: environment {name!r}: {fault}", fault.traceback) from fault
        except SystemExit as error:
            raise DatasetError(
                f"{FIELD}.generator: environment {name!r}: generate_dataset called sys.exit({error.code!r})",
                traceback_of(error),
            ) from error
        except Exception as error:
            # The environment is the user's code, so every exception concerns its rows.
            raise DatasetError(
                f"{FIELD}.generator: environment {name!r}: generate_dataset raised {type(error).__name__}: "
                f"{message_of(error)}",
                traceback_of(error),
            ) from error
