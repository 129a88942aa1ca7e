"""Passes over a dataset: its rows several times, each time in another order."""

from __future__ import annotations

import itertools
import pickle
import tempfile
from collections.abc import Iterable, Iterator

from kuberoll_workers.dataset.order import derived_seed, shuffled_order
from kuberoll_workers.dataset.record_file import RecordFile
from kuberoll_workers.dataset.rows import Row

_MEMORY_BYTES = 32 << 20


def passes(rows: Iterable[Row], count: int | None, *, seed: int | None) -> Iterator[Row]:
    """The rows `count` times: first as they come, then from a copy, beyond 32 MiB on disk.

    The source is read once. Memory grows by some 30 bytes for each row.

    Args:
        count: Number of passes; None: without end.
        seed: Seed of the orders of later passes, which differ from each other; None: all have the same order.
    """
    if count == 1:
        yield from rows
        return
    with tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES, prefix="kuberoll-rows-") as file:
        copies = RecordFile(file)
        for row in rows:
            # Not as JSON, which would turn a generator's tuples into lists.
            copies.append(pickle.dumps(row))
            yield row
        number = len(copies)
        for turn in range(1, count) if count is not None else itertools.count(1):
            if number == 0:
                return
            order = range(number) if seed is None else shuffled_order(number, derived_seed(seed, f"pass {turn}"))
            for index in order:
                row = pickle.loads(copies.read(index))
                assert isinstance(row, Row)
                yield row
