"""A file of a dataset's tasks, for readers that need them in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO

from kuberoll_workers.dataset.expansion import PromptGroup
from kuberoll_workers.dataset.record_file import RecordFile
from kuberoll_workers.dataset.rows import Row


class TaskFile:
    """What is needed of each task, on disk: 8 bytes of memory per task."""

    def __init__(self, file: IO[bytes], groups: Iterable[PromptGroup], encode: Callable[[Row], bytes]) -> None:
        """Read the dataset once.

        Args:
            file: Exclusive file.
            encode: Makes the bytes to keep of a task from its row.

        Raises:
            DatasetError: A row is invalid.
        """
        self._records = RecordFile(file)
        for group in groups:
            # Equal rows are one task, which was added with the first of them.
            if group.task_index == len(self):
                self._records.append(encode(group.row))

    def __len__(self) -> int:
        return len(self._records)

    def find(self, task: int) -> bytes | None:
        """What is kept of a task; None if the dataset has no such task."""
        return self._records.read(task) if 0 <= task < len(self) else None
