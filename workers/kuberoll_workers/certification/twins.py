"""Rows with the same prompt: what is a right answer to one of them must be one to the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import orjson

from kuberoll_workers.dataset.rows import Row

MAX_TWINS: Final = 8
"""Most other rows whose solutions are tried on a row."""


class Twins:
    """The rows of a dataset that share their prompt with others; only these are held in memory."""

    def __init__(self, rows: Callable[[], Iterable[Row]]) -> None:
        """
        Args:
            rows: Reads the dataset, from its beginning; called twice.
        """
        once: set[bytes] = set()
        several: set[bytes] = set()
        for row in rows():
            key = _key(row)
            (several if key in once else once).add(key)
        self._rows: dict[bytes, list[tuple[int, Row]]] = {}
        if several:
            for number, row in enumerate(rows()):
                if (key := _key(row)) in several:
                    self._rows.setdefault(key, []).append((number, row))

    def of(self, number: int, row: Row) -> Sequence[Row]:
        """Other rows with a row's prompt, the first ones, that are graded by something else than it is.

        Args:
            number: The row's, from 0.
        """
        found = self._rows.get(_key(row), ())
        others = [twin for place, twin in found if place != number and twin.metadata != row.metadata]
        return others[:MAX_TWINS]


def _key(row: Row) -> bytes:
    text = orjson.dumps([row.task_name, row.messages], option=orjson.OPT_NON_STR_KEYS)
    return hashlib.blake2b(text, digest_size=16).digest()
