"""A file of byte strings, for readers that need them in any order."""

from __future__ import annotations

from array import array
from typing import IO


class RecordFile:
    """Byte strings by number, on disk: 8 bytes of memory for each. All are added before the first is read."""

    def __init__(self, file: IO[bytes]) -> None:
        """`file` is exclusive, and empty."""
        self._file = file
        self._ends: array[int] = array("Q", [0])

    def append(self, data: bytes) -> None:
        """Add a byte string."""
        self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def read(self, number: int) -> bytes:
        """The byte string of a number, from 0."""
        begin, end = self._ends[number], self._ends[number + 1]
        self._file.seek(begin)
        return self._file.read(end - begin)
