"""Directories that hold datasets in forms of their own, which plug-ins read; and all other URIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final, Protocol

from kuberoll_api.plugins import DATASETS, installed
from kuberoll_workers.dataset.rows import DatasetError
from kuberoll_workers.dataset.sources import RawRow, file_rows, resolve_uri

TASK_FIELD: Final = "task"
"""Field of a row's metadata in which it describes a task of a form."""


class DatasetForm(Protocol):
    """A form of datasets in local directories, of the entry points `kuberoll.datasets`."""

    @property
    def environment(self) -> str | None:
        """Type of the class of the environments that play its rows, which need not name one then; None: any."""
        ...

    def holds(self, directory: Path) -> bool:
        """Say whether a directory has this form; quickly, and without exceptions."""
        ...

    def rows(self, directory: Path, name: str) -> Iterator[RawRow]:
        """Rows of a directory, in an order that does not change; in place of an invalid one, its DatasetError.

        Args:
            name: The directory as the job names it: relative to the manifest's, or absolute.

        Raises:
            DatasetError: There are none.
        """
        ...

    def complete(self, row: dict[str, Any], value: Mapping[str, Any], base: Path) -> dict[str, Any]:
        """A row of a file that describes a task of this form in the field `task` of its metadata.

        Args:
            row: The row; it is not changed.
            value: What is in the field.
            base: Directory of relative paths: the manifest's.

        Raises:
            DatasetError: The task cannot be read.
        """
        ...


def uri_rows(uri: str, base: Path, field: str, types: Mapping[str, str]) -> Iterator[RawRow]:
    """Rows of `source.uri`: of a directory with a form of its own, or of files.

    Args:
        types: Type of each environment of the job, by name.

    Raises:
        DatasetError: As `file_rows`.
    """
    location = resolve_uri(uri, base)
    form = None if "://" in location else _form_of(Path(location))
    if form is None:
        yield from file_rows(uri, base, field)
        return
    name = uri.removeprefix("file://")
    players = [player for player, kind in types.items() if kind == form.environment]
    own = {"task_name": players[0]} if len(players) == 1 else {}
    for place, row in form.rows(Path(location), location if name.startswith("~") else name):
        yield place, {**own, **row} if isinstance(row, dict) else row


def completed(
    rows: Iterator[RawRow], base: Path, types: Mapping[str, str], environments: Sequence[str]
) -> Iterator[RawRow]:
    """Rows, in which those that describe a task (`metadata.task`) have become what its environment plays.

    Args:
        types: Type of each environment of the job that has one, by name.
        environments: Names of those that rows may be for which name none.
    """
    for place, row in rows:
        metadata = row.get("metadata") if isinstance(row, dict) else None
        value = metadata.get(TASK_FIELD) if isinstance(metadata, dict) else None
        if not isinstance(row, dict) or not isinstance(value, dict):
            yield place, row
            continue
        named = row.get("task_name")
        players = [name for name in ([named] if named is not None else environments) if name in types]
        forms = [
            (player, form)
            for player in players
            for form in map(_loaded, installed(DATASETS).values())
            if form.environment == types[player]
        ]
        if len(forms) != 1:
            yield place, row
            continue
        [(player, form)] = forms
        try:
            yield place, form.complete({"task_name": player, **row}, value, base)
        except DatasetError as error:
            yield place, DatasetError(f"{place}: {error}")


def _form_of(directory: Path) -> DatasetForm | None:
    if not directory.is_dir():
        return None
    return next((form for form in map(_loaded, installed(DATASETS).values()) if form.holds(directory)), None)


def _loaded(entry: EntryPoint) -> DatasetForm:
    try:
        form: DatasetForm = entry.load()
    except ImportError as error:
        raise DatasetError(f"the form {entry.name!r} of datasets ({DATASETS}) cannot be loaded: {error}") from error
    return form
