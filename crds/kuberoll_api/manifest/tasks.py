"""Directories of tasks: which these are, and which of them rows name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

MARKS: Final = ("task.toml", "instruction.md", "tests/test.sh")
"""Files of which a directory has one at least if it is a task."""

_LEFT_OUT: Final = ("__pycache__", ".git")


def is_task(directory: Path) -> bool:
    """True if a directory is a task."""
    return any((directory / mark).is_file() for mark in MARKS)


def tasks_in(directory: Path) -> list[Path]:
    """The directories of tasks in a folder, by name."""
    names = {file.relative_to(directory).parts[0] for mark in MARKS for file in directory.glob(f"*/{mark}")}
    return [path for name in sorted(names) if is_task(path := directory / name)]


def files_of_task(directory: Path) -> list[Path]:
    """All files of a task, sorted; without what Python and git keep there."""
    found = []
    for place, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if name not in _LEFT_OUT]
        found += [Path(place, name) for name in names]
    return sorted(path for path in found if path.is_file())


def directories_of(rows: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """Numbers of rows, from 0, and the directories that they name in `metadata.task`."""
    for number, row in enumerate(rows):
        metadata = row.get("metadata") if isinstance(row, Mapping) else None
        task = metadata.get("task") if isinstance(metadata, Mapping) else None
        directory = task.get("directory") if isinstance(task, Mapping) else None
        if isinstance(directory, str) and directory:
            yield number, directory


def rows_of(file: Path) -> Iterator[Any]:
    """Rows of a file of JSON lines; None for what is no JSON, which who reads the dataset tells.

    Raises:
        OSError: The file cannot be read.
    """
    for line in file.read_bytes().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            yield None
