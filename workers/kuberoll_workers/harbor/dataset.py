"""Tasks as datasets, in folders and in rows of files: `harbor` of the entry points `kuberoll.datasets`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kuberoll_api.environment_types import SANDBOX_AGENT_TYPE
from kuberoll_api.manifest.tasks import is_task, tasks_in
from kuberoll_workers.dataset.forms import TASK_FIELD
from kuberoll_workers.dataset.rows import DatasetError, RowPosition
from kuberoll_workers.harbor.configuration import FILE
from kuberoll_workers.harbor.given import read_given
from kuberoll_workers.harbor.mistakes import TaskError
from kuberoll_workers.harbor.rows import FIELD, row_of
from kuberoll_workers.harbor.task import INSTRUCTION, TaskNames, find_tasks, read_task


class HarborTasks:
    """Directories of tasks, or of one: see `kuberoll_workers.dataset.forms.DatasetForm`."""

    environment = SANDBOX_AGENT_TYPE

    def holds(self, directory: Path) -> bool:
        """Say whether there is a task in a directory, or it is one."""
        return is_task(directory) or bool(tasks_in(directory))

    def rows(self, directory: Path, name: str) -> Iterator[tuple[RowPosition, dict[str, Any] | DatasetError]]:
        """The tasks as rows, by the names of their directories; for one that cannot be read, its mistakes.

        Args:
            name: The directory as the job names it.

        Raises:
            DatasetError: There are no tasks.
        """
        try:
            found = find_tasks(directory)
        except TaskError as error:
            raise DatasetError(str(error)) from error
        names = TaskNames()
        for path in found:
            place = RowPosition(f"{path / (FILE if (path / FILE).is_file() else INSTRUCTION)}:", 1)
            try:
                task = read_task(path)
                names.add(task)
            except TaskError as error:
                yield place, DatasetError(str(error))
            else:
                yield place, row_of(task, name if path == directory else f"{name.rstrip('/')}/{path.name}")

    def complete(self, row: dict[str, Any], value: Mapping[str, Any], base: Path) -> dict[str, Any]:
        """A row whose `metadata.task` (`harbor.given`) has become `metadata.harbor` (`harbor.rows`).

        Raises:
            DatasetError: The task cannot be read.
        """
        has_prompt = row.get("messages") is not None or row.get("prompt") is not None
        name = row.get("task_id")
        try:
            directory, given = read_given(value, has_prompt=has_prompt, name=name if isinstance(name, str) else None)
            made = row_of(read_task(None if directory is None else base / directory, given), directory)
        except TaskError as error:
            raise DatasetError(str(error)) from error
        metadata = {key: item for key, item in row["metadata"].items() if key != TASK_FIELD}
        found = {**row, "metadata": {**metadata, FIELD: made["metadata"][FIELD]}}
        return found if has_prompt else {**found, "messages": made["messages"]}


TASKS = HarborTasks()
