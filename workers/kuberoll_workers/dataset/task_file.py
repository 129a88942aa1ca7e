"""A file of a dataset's tasks, for readers that need them in any order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import IO

from kuberoll_workers.dataset.expansion import PromptGroup
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
        self._file = file
        self._ends: array[int] = array("q", [0])
        for group in groups:
            # Equal rows are one task, which was added with the first of them.
            if group.task_index == len(self):
                file.write(encode(group.row))
                self._ends.append(file.tell())

    def __len__(self) -> int:
        return len(self._ends) - 1

    def find(self, task: int) -> bytes | None:
        """What is kept of a task; None if the dataset has no such task."""
        if not 0 <= task < len(self):
            return None
        begin, end = self._ends[task], self._ends[task + 1]
        self._file.seek(begin)
        return self._file.read(end - begin)
