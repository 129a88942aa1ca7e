"""Folders of tasks as datasets: `harbor` of the entry points `kuberoll.datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kuberoll_api.model.environments import SANDBOX_AGENT_TYPE
from kuberoll_workers.dataset.rows import DatasetError, RowPosition
from kuberoll_workers.harbor.configuration import FILE
from kuberoll_workers.harbor.mistakes import TaskError
from kuberoll_workers.harbor.rows import row_of
from kuberoll_workers.harbor.task import TaskNames, find_tasks, read_task


class HarborTasks:
    """Directories of tasks, or of one: see `kuberoll_workers.dataset.forms.DatasetForm`."""

    environment = SANDBOX_AGENT_TYPE

    def holds(self, directory: Path) -> bool:
        """Say whether there is a task in a directory, or it is one."""
        return (directory / FILE).is_file() or next(directory.glob(f"*/{FILE}"), None) is not None

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
            place = RowPosition(f"{path / FILE}:", 1)
            try:
                task = read_task(path)
                names.add(task)
            except TaskError as error:
                yield place, DatasetError(str(error))
            else:
                yield place, row_of(task, name if path == directory else f"{name.rstrip('/')}/{path.name}")


TASKS = HarborTasks()
